"""Probabilities that are masked after the softmax and divided by the sum of the remaining ones, which is equivalent to
masking the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.values import knowledge
from ..ir.values.choices import choice
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match
from .masks import where_one
from .rule import AttentionRule
from .softmax_forms import reduction

T: dict[str, Any] = {"dialects": ["torch"]}


def _divided(p: Any) -> Any:
    return p / p.sum(-1, True)


@dataclass(frozen=True)
class Masked:
    """Probabilities of which some are set to zero."""

    node: Node
    probabilities: Any
    mask: Node | None
    """The mask; None if the probabilities above the diagonal are set to zero."""
    masks_out: bool = False
    diagonal: Any = 0
    by_product: bool = False
    proved: bool = True
    """False for a factor that may hold other numbers than zeros and ones."""


class MaskBeforeSoftmax(AttentionRule):
    """softmax(x) * m / sum(softmax(x) * m) -> softmax(x + where(m, 0, -inf)), if m is proved to hold zeros and ones"""

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        call = program.call(node)
        if call is None or call.op != "div" or call.mutates or call.get("rounding_mode") is not None:
            return
        masked, total = _masked(program, call.args["self"]), reduction(program, call.args["other"], ("sum",))
        if masked is None:
            return
        if total is not None and total.operand is masked.node:
            covers = [*total.nodes, masked.node, masked.probabilities]
            yield Match.at(program, node, covers=covers, masked=masked, total=total)
        elif total is None and _is_bounded_sum(program, call.args["other"], masked):
            yield Match.at(program, node, problem=BOUNDED_SUM)

    def check(self, m, masked, total):
        whole, own = tensor_fact(masked.node), tensor_fact(masked.probabilities)
        stretched = whole is None or own is None or not known_equal(whole.shape, own.shape)
        m.require(not stretched, "the probabilities are stretched")
        softmax = m.program.call(masked.probabilities)
        m.require(softmax.args.get("dim") == total.dim, "divided by a sum over another axis than the softmax")
        m.require(masked.proved, "the probabilities are multiplied by what is not proved to be zeros and ones")
        elsewhere = set(masked.node.users) - {m.root.node, *total.nodes}
        m.require(
            not elsewhere and set(masked.probabilities.users) == {masked.node}, "the probabilities are used elsewhere"
        )

    def rewrite(self, op, m, masked, total):
        cut = _cut(op, masked, op.program.call(masked.probabilities).args["self"])
        return op.softmax(cut, total.dim, dtype=None if m.root.dtype == cut.dtype else m.root.dtype)

    examples = [
        fires(lambda x, mask: _divided(x.softmax(-1) * (mask | ~mask.any(-1, True))), "f32[4, 6, 6]", "bool[6, 6]",
              **T),
        fires(lambda x, mask: _divided(x.softmax(-1).masked_fill(mask & ~mask.all(-1, True), 0.0)), "f32[4, 6, 6]",
              "bool[6, 6]", **T),
        fires(lambda x: _divided(x.softmax(-1).tril()), "f32[4, 6, 6]", **T),
        declines(lambda x, mask: _divided(x.softmax(-1) * mask), "f32[4, 6, 6]", "f32[6, 6]", **T,
                 because="not proved to be zeros and ones"),
        declines(lambda x, mask: (lambda p: p / (p.sum(-1, True) + 1e-6))(x.softmax(-1) * mask), "f32[4, 6, 6]",
                 "bool[6, 6]", **T, because="how large it is counts"),
        declines(lambda x, mask: _divided(x.softmax(-2) * mask), "f32[4, 6, 6]", "bool[6, 6]", **T,
                 because="another axis"),
        declines(lambda x, mask: (lambda p: (_divided(p), p))(x.softmax(-1) * mask), "f32[4, 6, 6]", "bool[6, 6]", **T,
                 because="used elsewhere"),
        declines(lambda x: _divided(x.softmax(-1)), "f32[4, 6, 6]", **T),
    ]  # fmt: skip


BOUNDED_SUM = "the sum of what the mask keeps is not divided by as it is: how large it is counts"


def _is_bounded_sum(program: Program, bottom: Any, masked: Masked) -> bool:
    """Is something added to the sum of the masked probabilities, or is the sum clamped from below?"""
    between = program.call(bottom) if isinstance(bottom, Node) else None
    if between is None or between.op not in ("add", "clamp", "maximum") or between.mutates:
        return False
    inner = reduction(program, between.args.get("self"), ("sum",))
    return inner is not None and inner.operand is masked.node


def _cut(op: Emitter, masked: Masked, scores: Node) -> Value:
    """The scores with -inf where the probabilities are set to zero. Where these were multiplied by a mask, -inf is
    added instead of filled in, so that the gradients of a row without a key are NaN as before."""
    if masked.mask is None:
        shape = Value(op.program, scores).shape[-2:]
        keep = op.tril(op.full(shape, True, dtype=torch.bool, device=Value(op.program, scores).device), masked.diagonal)
        return op.masked_fill(scores, op.logical_not(keep), -math.inf)
    if not masked.by_product:
        mask = Value(op.program, masked.mask)
        return op.masked_fill(scores, mask if masked.masks_out else op.logical_not(mask), -math.inf)
    zero = op.full([], 0.0, dtype=Value(op.program, scores).dtype, device=Value(op.program, scores).device)
    return op.add(scores, op.where(where_one(op, masked.mask), zero, -math.inf))


def _masked(program: Program, node: Any) -> Masked | None:
    call = program.call(node) if isinstance(node, Node) else None
    if call is None or call.mutates:
        return None
    own, other = call.args.get("self"), call.args.get("other")
    masked = None
    if call.op == "mul":
        probabilities, mask = (own, other) if _is_softmax(program, own) else (other, own)
        by = choice(program, mask)
        if isinstance(probabilities, Node) and isinstance(mask, Node):
            masked = Masked(node, probabilities, mask, by_product=True, proved=by is not None and by.is_mask)
    elif call.op == "masked_fill" and _is_zero(program, call.args["value"]):
        masked = Masked(node, own, call.args["mask"], masks_out=True)
    elif call.op == "where" and _is_zero(program, other):
        masked = Masked(node, own, call.args["condition"])
    elif call.op == "where" and _is_zero(program, own):
        masked = Masked(node, other, call.args["condition"], masks_out=True)
    elif call.op == "tril":
        masked = Masked(node, own, None, diagonal=call.get("diagonal"))
    return masked if masked is not None and _is_softmax(program, masked.probabilities) else None


def _is_softmax(program: Program, node: Any) -> bool:
    call = program.call(node) if isinstance(node, Node) else None
    return call is not None and call.op == "softmax" and not call.mutates and isinstance(call.args.get("dim"), int)


def _is_zero(program: Program, value: Any) -> bool:
    return knowledge(program).number(value) == 0
