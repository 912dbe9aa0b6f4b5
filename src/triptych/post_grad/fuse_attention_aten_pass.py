"""`fuse_attention_aten_pass`: attention written by hand, in an ATen graph after autograd.

`fuse_attention` of the first stage reads attention before autograd, and so it serves training too. This pass reads it
in graphs that never went through that stage, such as one from `make_fx`, and in the output of the user's own passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..attention.draft import Sheet, reshaped_from
from ..attention.fuse import AttentionByHand, Way
from ..attention.preparation import ShapeOfScores
from ..attention.rule import InDecomposedGraph
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import FirstOf, Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
QKV = ["f32[2, 4, 6, 8]"] * 3
HALF = ["bf16[2, 4, 6, 8]"] * 3


def _softmax(scores: Any, scale: float = 1.0) -> Any:
    """Softmax as it is spelled after autograd; with a scale, as the joint stage leaves it."""
    shifted = scores - scores.amax(-1, keepdim=True)
    e = (shifted if scale == 1 else shifted * scale).exp()
    return e / e.sum(-1, keepdim=True)


def _causal(q: Any, k: Any, v: Any) -> Any:
    above = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return _softmax((q @ k.mT * 0.3).masked_fill(above, -math.inf)) @ v


def _repeated_heads(q: Any, k: Any, v: Any) -> Any:
    k, v = (x[:, :, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for x in (k, v))
    return _softmax(q @ k.mT / 8**0.5) @ v


def _row_without_key() -> Any:
    masked = torch.zeros(6, 6, dtype=torch.bool)
    masked[2], masked[3, 1:] = True, True
    return masked


def _probabilities_too(q: Any, k: Any, v: Any) -> Any:
    probabilities = _softmax(q @ k.mT)
    return probabilities @ v, probabilities


def _scores_too(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    return _softmax(scores) @ v, scores


def _maximum_too(q: Any, k: Any, v: Any) -> Any:
    """Also returns the maximum, which a training step saves to recompute the probabilities."""
    scores = q @ k.mT
    highest = scores.amax(-1, keepdim=True)
    e = (scores - highest).exp()
    return e / e.sum(-1, keepdim=True) @ v, highest


def _dropout(q: Any, k: Any, v: Any) -> Any:
    return _softmax(q @ k.mT) * (torch.rand(2, 4, 6, 6) > 0.1) / 0.9 @ v


@dataclass(frozen=True)
class FuseAttentionAten(InDecomposedGraph, AttentionByHand):
    """bmm(softmax(scale * bmm(Q, K^T) + bias), V) -> the attention kernel that torch has for it, up to rounding"""

    @classmethod
    def rule_name(cls) -> str:
        return "fuse_attention_aten"

    def check(self, m, ways, sheet):
        m.require(m.program.is_inference, "the backward of a training step needs the probabilities")
        super().check(m, ways, sheet)

    def _fused(self, op: Emitter, m: Match, way: Way, sheet: Sheet) -> FirstOf:
        alternatives = super()._fused(op, m, way, sheet)
        attention = way.plan(sheet, self.lowest_score).attention
        operands = (attention.product.left, attention.product.right, attention.values.right)
        m.leave_behind(n for operand in operands for n in (operand, *reshaped_from(m.program, operand)))
        return alternatives

    examples = [
        fires(lambda q, k, v: _softmax(q @ k.mT / 8**0.5) @ v, *QKV, **ATEN),
        fires(lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v, *QKV, **ATEN),
        fires(lambda q, k, v: _softmax(q @ k.mT, 0.3) @ v, *QKV, **ATEN),
        fires(lambda q, k, v, m: _softmax((q @ k.mT).masked_fill(m, -math.inf)) @ v, *QKV, "bool[2, 1, 6, 6]", **ATEN),
        fires(lambda q, k, v, m: _softmax((q @ k.mT).masked_fill(m, -math.inf)) @ v, *QKV, _row_without_key(), **ATEN),
        fires(lambda q, k, v, m: _softmax((q @ k.mT).masked_fill(m, -1e9)) @ v, *QKV, _row_without_key(), **ATEN),
        fires(lambda q, k, v, bias: _softmax(q @ k.mT * 0.3 + bias) @ v, *QKV, "f32[2, 1, 6, 6]", **ATEN),
        fires(_causal, *QKV, **ATEN),
        fires(_repeated_heads, "f32[2, 4, 6, 8]", *["f32[2, 2, 6, 8]"] * 2, **ATEN),
        fires(lambda q, k, v: _softmax((q @ k.mT * 0.3).float()).bfloat16() @ v, *HALF, **ATEN),
        fires(lambda q, k, v: torch.mm(_softmax(torch.mm(q, k.t())), v), *["f32[6, 8]"] * 3, **ATEN),
        fires(lambda q, k, v: torch.bmm(_softmax(torch.bmm(q, k.mT) / 3), v), *["f32[2, 6, 8]"] * 3, **ATEN,
              dynamic=True),
        declines(_probabilities_too, *QKV, **ATEN, because="used 2 times"),
        declines(_scores_too, *QKV, **ATEN, because="used outside the attention"),
        declines(_maximum_too, *QKV, **ATEN, because="used outside the attention"),
        declines(_dropout, *QKV, **ATEN, same_values=False, because="a factor of the probabilities"),
        declines(lambda q, k, v: (q @ k.mT).softmax(-2) @ v, *QKV, **ATEN, because="not over the keys"),
        declines(lambda q, k, v, m: _softmax((q @ k.mT).masked_fill(m, -10)) @ v, *QKV, "bool[6, 6]", **ATEN,
                 because="may count beside others"),
        declines(lambda q, k, v: _softmax(q @ k.mT) @ v, *QKV[:2], "f32[2, 4, 6, 64]", **ATEN, because="no kernel"),
        declines(lambda q, k, v: _softmax(q @ k.mT) @ v, *QKV, **ATEN, is_inference=False, because="training"),
        declines(lambda q, k: _softmax(q @ k.mT), *QKV[:2], **ATEN),
    ]  # fmt: skip


class ShapeOfScoresAten(InDecomposedGraph, ShapeOfScores):
    """sym_size(scores, 3) -> sym_size(K, 2): a size needs no scores"""

    examples = [
        fires(lambda q, k, v: _softmax(q @ k.mT) @ v, *QKV, **ATEN, dynamic=True),
        declines(lambda q, k, v: _softmax(q @ k.mT) @ v, *QKV, **ATEN),
        declines(lambda q, k: _softmax(q @ k.mT), *QKV[:2], **ATEN, dynamic=True),
    ]


@dataclass(frozen=True)
class FuseAttentionAtenPass(Pass):
    """softmax(scale * Q K^T + bias) V after autograd -> the attention kernel that torch chooses for its device, such as
    `_scaled_dot_product_flash_attention_for_cpu`. Where torch has none, nothing changes.

    It recognises what `fuse_attention` recognises, under the same conditions, except for the spellings that other rules
    of that pass rewrite first. A softmax may be one call or written out, its scale may be applied after its maximum is
    subtracted, and the batch axes may be merged around the products, as they all are after autograd. The pass works
    only in inference: the backward of a training step needs the probabilities. Dropout is a product with random numbers
    after autograd, and is not fused.
    """

    name: ClassVar[str] = "fuse_attention_aten_pass"
    default: ClassVar[bool] = False

    lowest_score: float = -1e8
    """As in `fuse_attention`: scores that are not masked are above this number."""

    def rules(self) -> Sequence[Rule]:
        return (
            ShapeOfScoresAten(),  # first: the other declines where anything else reads the scores
            FuseAttentionAten(self.lowest_score),
        )
