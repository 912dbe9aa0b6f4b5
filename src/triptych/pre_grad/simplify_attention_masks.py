"""Drops attention masks that mask nothing, and replaces mask tensors that are a lower triangle by `is_causal=True`.

`scaled_dot_product_attention` chooses its kernel by its arguments: with a mask, a GPU often has only a slow kernel. So
this runs before autograd, where attention is still one call and the choice is open. The contents of a mask are proved
from the operations that build it (`arange`, comparisons, expands, `tril`, ...), for static and symbolic sizes; nothing
is guessed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.operands import laid_out, lies_across
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.values import Knowledge, knowledge
from ..match.pattern import PatternBuilder, Tensor
from ..rewrite.edits import EraseUnused, ReplaceAll, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule

ATTENTION = "scaled_dot_product_attention"

TORCH = ("torch",)
ON_CPU = {"device": "cpu"}
INF = float("inf")


def _full_mask(q, k, v):
    rows = torch.arange(q.shape[-2])[None, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, (rows >= 0).expand(q.shape[0], -1, -1, k.shape[-2]))


def _ones(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool))


def _with_zeros(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, torch.zeros(q.shape[-2], k.shape[-2]), scale=0.3)


def _lower(q, k, v):
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def _compared(q, k, v, window=None):
    rows, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    keep = keys <= rows
    if window is not None:
        keep = keep & (keys > rows - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[None, None].expand(q.shape[0], 1, -1, -1))


def _windowed(q, k, v):
    return _compared(q, k, v, window=3)


def _wide_window(q, k, v):
    return _compared(q, k, v, window=64)


def _packed(q, k, v):
    """As in models that also support several packed sequences; here there is one sequence."""
    positions = torch.arange(q.shape[-2])[None].expand(q.shape[0], -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch, rows = torch.arange(q.shape[0])[:, None, None, None], torch.arange(q.shape[-2])[None, None, :, None]
    keys = torch.arange(k.shape[-2])[None, None, None, :]
    keep = (keys <= rows) & (sequence[batch, rows] == sequence[batch, keys])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def _upper_bias(q, k, v):
    bias = torch.triu(torch.full((q.shape[-2], k.shape[-2]), -INF), diagonal=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _finite_bias(q, k, v):
    bias = torch.triu(torch.full((q.shape[-2], k.shape[-2]), -1e9), diagonal=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _both(q, k, v, keep):
    bias = torch.where(keep, 0.0, -INF)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _kept_bias(q, bias):
    keep = (torch.arange(q.shape[-2])[:, None] >= 0).expand(-1, q.shape[-2])
    return F.scaled_dot_product_attention(q, q, q, torch.where(keep, bias, torch.finfo(q.dtype).min))


def _bias_and_zero(q, bias):
    padding = (1.0 - torch.ones(q.shape[0], 1, 1, q.shape[-2])) * torch.finfo(q.dtype).min
    return F.scaled_dot_product_attention(q, q, q, bias + padding)


class MaskRule(Rule, ABC):
    """attention(q, k, v, mask) -> attention without the mask, or with a simpler one; what these rules share"""

    exact = False
    mixed_dtypes = True
    takes_random = True  # dropout stays what it was, in the same place

    def pattern(self, op: PatternBuilder, q, k, v, mask, dropout, scale, gqa):
        return op.scaled_dot_product_attention(q, k, v, mask, dropout, False, scale=scale, enable_gqa=gqa)

    @abstractmethod
    def rewrite(self, op, m): ...

    def without_mask(self, op: Any, m: Match, is_causal: bool = False) -> Together:
        """Attention without the mask; the mask and everything computed only for it are erased."""
        attention = Replacement((m.root.node,), (self.attend(op, m, is_causal=is_causal),), op, m.nodes, self)
        return Together([ReplaceAll([attention]), EraseUnused([m["mask"].node])])

    def about(self, m: Match, mask: Any) -> Knowledge:
        m.applies(isinstance(mask, Value) and mask.is_tensor, "no mask")
        m.require(not mask.tensor.requires_grad, "the mask requires a gradient", at=mask)
        return knowledge(m.program)

    def attend(self, op: Any, m: Match, mask: Any = None, is_causal: bool = False) -> Value:
        arguments = {"dropout_p": m["dropout"], "scale": m["scale"], "enable_gqa": m["gqa"]}
        defaults = {"dropout_p": 0.0, "scale": None, "enable_gqa": False}
        options = {k: v for k, v in arguments.items() if isinstance(v, Value) or v != defaults[k]}
        if is_causal:
            options["is_causal"] = True
        if mask is not None:
            options["attn_mask"] = mask
        return op.scaled_dot_product_attention(m["q"], m["k"], m["v"], **options)


class DropFullMask(MaskRule):
    """attention(q, k, v, mask) -> attention(q, k, v), where the mask is true everywhere; up to rounding"""

    def check(self, m: Match, mask: Any) -> None:
        about = self.about(m, mask)
        m.applies(mask.dtype == torch.bool)
        m.require(about.is_all_true(mask.node), "the mask is not known to be true everywhere", at=mask)

    def rewrite(self, op: Any, m: Match) -> Together:
        return self.without_mask(op, m)

    examples = [
        fires(_full_mask, "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", dialects=TORCH),
        fires(_full_mask, "f32[2, 4, 6, 8]", "f32[2, 4, 9, 8]", "f32[2, 4, 9, 8]", dialects=TORCH, dynamic=True),
        fires(_ones, "f32[2, 4, 6, 8]", "f32[2, 4, 9, 8]", "f32[2, 4, 9, 8]", dialects=TORCH),
        fires(_ones, "f32[6, 8]", "f32[9, 8]", "f32[9, 8]", dialects=TORCH, dynamic=True),
        declines(_lower, "f32[2, 6, 8]", "f32[2, 6, 8]", "f32[2, 6, 8]", dialects=TORCH, because="true everywhere"),
        declines(_both, "f32[2, 6, 8]", "f32[2, 6, 8]", "f32[2, 6, 8]", "bool[6, 6]", dialects=TORCH),
        declines(
            lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
            "f32[2, 6, 8]", "f32[2, 6, 8]", "f32[2, 6, 8]", torch.ones(6, 6, dtype=torch.bool),
            dialects=TORCH, because="true everywhere",
        ),
    ]  # fmt: skip


class DropZeroBias(MaskRule):
    """attention(q, k, v, bias) -> attention(q, k, v), where the bias is 0 everywhere; up to rounding"""

    def check(self, m: Match, mask: Any) -> None:
        about = self.about(m, mask)
        m.applies(mask.is_float)
        m.require(about.is_zero(mask.node), "the bias is not known to be 0", at=mask)

    def rewrite(self, op: Any, m: Match) -> Together:
        return self.without_mask(op, m)

    examples = [
        fires(_with_zeros, "f32[2, 4, 6, 8]", "f32[2, 4, 9, 8]", "f32[2, 4, 9, 8]", dialects=TORCH),
        fires(_with_zeros, "f32[2, 4, 6, 8]", "f32[2, 4, 9, 8]", "f32[2, 4, 9, 8]", dialects=TORCH, dynamic=True),
        fires(
            lambda q: F.scaled_dot_product_attention(q, q, q, (1.0 - torch.ones(2, 1, 1, 6)) * -1e9),
            "f32[2, 4, 6, 8]", dialects=TORCH,
        ),
        declines(_finite_bias, "f32[6, 8]", "f32[6, 8]", "f32[6, 8]", dialects=TORCH, because="known to be 0"),
    ]  # fmt: skip


class CausalMask(MaskRule):
    """attention(q, k, v, mask) -> attention(q, k, v, is_causal=True), where mask is a lower triangle, with as many
    queries as keys; up to rounding"""

    def check(self, m: Match, q: Any, k: Any, mask: Any) -> None:
        about = self.about(m, mask)
        lengths = q.is_tensor and k.is_tensor and mask.rank >= 2
        same = lengths and known_equal((q.shape[-2], k.shape[-2]), mask.shape[-2:])
        triangle = about.is_causal if mask.dtype == torch.bool else about.is_causal_bias
        square = same and known_equal(q.shape[-2], k.shape[-2])
        m.require(square, "the numbers of queries and keys are not known to be equal", at=mask, found=mask.shape)
        m.require(triangle(mask.node), "the mask is not known to be the lower triangle", at=mask)

    def rewrite(self, op: Any, m: Match) -> Together:
        return self.without_mask(op, m, is_causal=True)

    examples = [
        fires(_lower, "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", dialects=TORCH),
        fires(_compared, "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", dialects=TORCH),
        fires(_packed, "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", dialects=TORCH),
        fires(_upper_bias, "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", dialects=TORCH),
        fires(_wide_window, "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", "f32[2, 4, 6, 8]", dialects=TORCH),
        fires(lambda q: _compared(q, q, q), "f32[2, 4, 6, 8]", dialects=TORCH, dynamic=True),
        fires(lambda q: _packed(q, q, q), "f32[2, 4, 6, 8]", dialects=TORCH, dynamic=True),
        fires(lambda q: _upper_bias(q, q, q), "f32[2, 4, 6, 8]", dialects=TORCH, dynamic=True),
        declines(lambda q: _windowed(q, q, q), "f32[2, 4, 6, 8]", dialects=TORCH, because="triangle"),
        declines(lambda q: _windowed(q, q, q), "f32[2, 4, 6, 8]", dialects=TORCH, dynamic=True, because="triangle"),
        declines(lambda q: _wide_window(q, q, q), "f32[2, 4, 6, 8]", dialects=TORCH, dynamic=True, because="triangle"),
        declines(_lower, "f32[2, 4, 6, 8]", "f32[2, 4, 9, 8]", "f32[2, 4, 9, 8]", dialects=TORCH,
                 because="not known to be equal"),
        declines(_finite_bias, "f32[6, 8]", "f32[6, 8]", "f32[6, 8]", dialects=TORCH, because="triangle"),
    ]  # fmt: skip


class BooleanMask(MaskRule):
    """attention(q, k, v, where(keep, 0, -inf)) -> attention(q, k, v, keep)"""

    def pattern(self, op: PatternBuilder, q, k, v, keep, fill, dropout, scale, gqa):
        bias = op.where(keep, 0.0, fill)
        return op.scaled_dot_product_attention(q, k, v, bias, dropout, False, scale=scale, enable_gqa=gqa)

    def check(self, m: Match, keep: Any, fill: Any) -> None:
        m.applies(isinstance(keep, Value) and keep.dtype == torch.bool and keep.rank >= 2)
        finite = "a finite fill lets a row without keys attend to all of them"
        m.require(fill == -math.inf, finite, at=m.nodes[1], wanted=-math.inf, found=fill)

    def rewrite(self, op: Any, m: Match, keep: Any) -> Value:
        return self.attend(op, m, mask=keep)

    examples = [
        fires(_both, "f32[2, 6, 8]", "f32[2, 6, 8]", "f32[2, 6, 8]", "bool[6, 6]", dialects=TORCH),
        fires(_both, "f32[2, 6, 8]", "f32[2, 6, 8]", "f32[2, 6, 8]", "bool[6, 6]", dialects=TORCH, dynamic=True),
        declines(
            lambda q, keep: F.scaled_dot_product_attention(q, q, q, torch.where(keep, 0.0, -1e9)),
            "f32[2, 6, 8]", "bool[6, 6]", dialects=TORCH, because="finite fill",
        ),
    ]  # fmt: skip


class KeptBias(MaskRule):
    """attention(q, k, v, where(keep, bias, fill)) -> attention(q, k, v, bias), where keep is true everywhere"""

    interior_may_be_used = True

    def pattern(self, op: PatternBuilder, q, k, v, keep, bias: Tensor, fill, dropout, scale, gqa):
        mask = op.where(keep, bias, fill)
        return op.scaled_dot_product_attention(q, k, v, mask, dropout, False, scale=scale, enable_gqa=gqa)

    def check(self, m: Match, q: Any, keep: Any, bias: Any, fill: Any) -> None:
        m.applies(isinstance(keep, Value) and bias.rank >= 2 and bias.dtype == q.dtype)
        filler = fill.tensor if isinstance(fill, Value) else None
        m.require(filler is None or not filler.requires_grad, "the fill requires a gradient", at=fill)
        m.require(knowledge(m.program).is_all_true(keep.node), "the mask is not known to be true everywhere", at=keep)

    def rewrite(self, op: Any, m: Match, bias: Any) -> Value:
        return self.attend(op, m, mask=bias)

    examples = [
        fires(_kept_bias, "f32[2, 4, 6, 8]", "f32[1, 4, 6, 6]", dialects=TORCH),
        fires(_kept_bias, "f32[2, 4, 6, 8]", "f32[1, 4, 6, 6]", dialects=TORCH, dynamic=True),
        declines(
            lambda q, bias, keep: F.scaled_dot_product_attention(q, q, q, torch.where(keep, bias, -1e9)),
            "f32[2, 4, 6, 8]", "f32[4, 6, 6]", "bool[6, 6]", dialects=TORCH, because="true everywhere",
        ),
    ]  # fmt: skip


class BiasAndZero(MaskRule):
    """attention(q, k, v, bias + zero) -> attention(q, k, v, bias), where zero is 0.0 or -0.0 everywhere"""

    interior_may_be_used = True

    def pattern(self, op: PatternBuilder, q, k, v, bias: Tensor, zero: Tensor, dropout, scale, gqa):
        mask = op.add(bias, zero)
        return op.scaled_dot_product_attention(q, k, v, mask, dropout, False, scale=scale, enable_gqa=gqa)

    def check(self, m: Match, q: Any, bias: Any, zero: Any) -> None:
        m.applies(bias.rank >= 2 and bias.dtype == q.dtype)
        m.require(not zero.tensor.requires_grad, "the added value requires a gradient", at=zero)
        m.require(knowledge(m.program).is_zero(zero.node), "the added value is not known to be 0", at=zero)

    def rewrite(self, op: Any, m: Match, bias: Any) -> Value:
        return self.attend(op, m, mask=bias)

    examples = [
        fires(_bias_and_zero, "f32[2, 4, 6, 8]", "f32[1, 4, 6, 6]", dialects=TORCH),
        fires(_bias_and_zero, "f32[2, 4, 6, 8]", "f32[1, 4, 6, 6]", dialects=TORCH, dynamic=True),
        declines(
            lambda q, bias: F.scaled_dot_product_attention(q, q, q, bias + bias),
            "f32[2, 4, 6, 8]", "f32[4, 6, 6]", dialects=TORCH, because="known to be 0",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class LayOutMask(Rule):
    """attention(q, k, v, mask) -> attention(q, k, v, copy of mask), where the mask is not contiguous along the keys"""

    device: str = "cuda"
    """The kind of device whose kernels cannot read such a mask."""

    exact = False
    takes_random = True  # dropout stays what it was, in the same place

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of(ATTENTION):
            call = None if node._erased else program.call(node)
            if call is None or call.op != ATTENTION:
                continue
            mask, key = (tensor_fact(call.args.get(name)) for name in ("attn_mask", "key"))
            if mask is not None and key is not None and lies_across(mask, key.shape[-2], self.device):
                yield Match.at(program, node)

    def rewrite(self, op, m):
        args = m.root.call.args
        mask, key = (Value(op.program, args[name]) for name in ("attn_mask", "key"))
        return op.scaled_dot_product_attention(**{**args, "attn_mask": laid_out(op, mask, key.shape[-2], self.device)})

    examples = [
        fires(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask.mT), "f32[2, 6, 8]", "f32[6, 6]",
              dialects=TORCH, settings=ON_CPU),
        fires(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), "f32[2, 6, 8]", "bool[6, 1]",
              dialects=TORCH, settings=ON_CPU),
        declines(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), "f32[2, 6, 8]", "f32[6, 6]",
                 dialects=TORCH, settings=ON_CPU),
        declines(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask.mT), "f32[2, 6, 8]", "f32[6, 6]",
                 dialects=TORCH),
    ]  # fmt: skip


RULES: tuple[Rule, ...] = (
    DropFullMask(),
    DropZeroBias(),
    CausalMask(),
    BooleanMask(),
    KeptBias(),
    BiasAndZero(),
    LayOutMask(),  # last: for the masks that the others have left
)


@dataclass(frozen=True)
class SimplifyAttentionMasks(Pass):
    """Drops attention masks that mask nothing, and replaces masks that are a lower triangle by `is_causal`. Up to
    rounding, since another kernel may then compute the attention.

    It also replaces a bias of 0 and -inf by its boolean mask, and copies a mask that is not contiguous along the keys,
    which the kernels of a GPU cannot read. Masks whose contents cannot be proved from the graph are left alone.
    """

    name = "simplify_attention_masks"

    def rules(self) -> Sequence[Rule]:
        return RULES
