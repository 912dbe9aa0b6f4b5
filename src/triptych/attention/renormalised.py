"""Probabilities that are masked after the softmax and divided by the sum of what is left: a mask of the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..passes.base import PassRun
from ..rewrite.emit import Emitter
from .choices import choice, kept_by
from .masks import one_number
from .softmax import reduction


@dataclass(frozen=True)
class Masked:
    """Probabilities of which some are set to zero."""

    node: Node
    probabilities: Any
    mask: Node | None
    """None: those above the diagonal are."""
    masks_out: bool = False
    diagonal: Any = 0
    by_product: bool = False
    proved: bool = True
    """A factor that holds nothing but zeros and ones."""


def mask_before_softmax(run: PassRun, node: Node) -> None:
    """softmax(x) * m / sum(softmax(x) * m) -> softmax(x + where(m, 0, -inf)), if m is proved to hold zeros and ones"""
    program = run.program
    call = program.call(node) if not node._erased else None
    if call is None or call.op != "div" or call.mutates or call.get("rounding_mode") is not None:
        return
    masked = _masked(program, call.args["self"])
    if masked is None or (reason := _obstacle(program, node, masked)) is None:
        return
    if reason:
        return run.declined("mask_before_softmax", node, reason)
    softmax, made = program.call(masked.probabilities), tensor_fact(node)
    total = reduction(program, call.args["other"], ("sum",))
    assert softmax is not None and total is not None and made is not None

    def make(op: Emitter) -> Any:
        cut = _cut(op, masked, softmax.args["self"])
        return op.softmax(cut, total.dim, dtype=None if made.dtype == cut.dtype else made.dtype)

    run.replace("mask_before_softmax", node, make, covered=[*total.nodes, masked.node, masked.probabilities])


def _obstacle(program: Program, node: Node, masked: Masked) -> str | None:
    """Why it stays as it is; nothing if it need not, None if it is another thing."""
    call, softmax = program.call(node), program.call(masked.probabilities)
    assert call is not None and softmax is not None
    bottom = call.args["other"]
    between = program.call(bottom) if isinstance(bottom, Node) else None
    total = reduction(program, bottom, ("sum",))
    if total is None and between is not None and between.op in ("add", "clamp", "maximum") and not between.mutates:
        inner = reduction(program, between.args.get("self"), ("sum",))
        if inner is not None and inner.scores is masked.node:
            return "the sum of what the mask keeps is not divided by as it is: how large it is counts"
    if total is None or total.scores is not masked.node:
        return None
    whole, own = tensor_fact(masked.node), tensor_fact(masked.probabilities)
    if whole is None or own is None or not known_equal(whole.shape, own.shape):
        return "the probabilities are stretched"
    if softmax.args.get("dim") != total.dim:
        return "divided by a sum over another axis than the softmax"
    if not masked.proved:
        return "the probabilities are multiplied by what is not proved to be zeros and ones"
    if set(masked.node.users) - {node, *total.nodes} or set(masked.probabilities.users) != {masked.node}:
        return "the probabilities are used elsewhere"
    return ""


def _cut(op: Emitter, masked: Masked, scores: Node) -> Value:
    """The scores with -inf where the probabilities are set to zero: added where they were multiplied, since then the
    gradients of a row without a key are NaN all the same."""
    if masked.mask is None:
        shape = Value(op.program, scores).shape[-2:]
        keep = op.tril(op.full(shape, True, dtype=torch.bool, device=Value(op.program, scores).device), masked.diagonal)
        return op.masked_fill(scores, op.logical_not(keep), -math.inf)
    if not masked.by_product:
        mask = Value(op.program, masked.mask)
        return op.masked_fill(scores, mask if masked.masks_out else op.logical_not(mask), -math.inf)
    zero = op.full([], 0.0, dtype=Value(op.program, scores).dtype, device=Value(op.program, scores).device)
    return op.add(scores, op.where(kept_by(op, masked.mask), zero, -math.inf))


def _masked(program: Program, node: Any) -> Masked | None:
    call = program.call(node) if isinstance(node, Node) else None
    if call is None or call.mutates:
        return None
    own, other = call.args.get("self"), call.args.get("other")
    found = None
    if call.op == "mul":
        probabilities, mask = (own, other) if _is_softmax(program, own) else (other, own)
        by = choice(program, mask)
        if isinstance(probabilities, Node) and isinstance(mask, Node):
            found = Masked(node, probabilities, mask, by_product=True, proved=by is not None and by.is_mask)
    elif call.op == "masked_fill" and _is_zero(program, call.args["value"]):
        found = Masked(node, own, call.args["mask"], masks_out=True)
    elif call.op == "where" and _is_zero(program, other):
        found = Masked(node, own, call.args["condition"])
    elif call.op == "where" and _is_zero(program, own):
        found = Masked(node, other, call.args["condition"], masks_out=True)
    elif call.op == "tril":
        found = Masked(node, own, None, diagonal=call.get("diagonal"))
    return found if found is not None and _is_softmax(program, found.probabilities) else None


def _is_softmax(program: Program, node: Any) -> bool:
    call = program.call(node) if isinstance(node, Node) else None
    return call is not None and call.op == "softmax" and not call.mutates and isinstance(call.args.get("dim"), int)


def _is_zero(program: Program, value: Any) -> bool:
    number = one_number(program, value)
    return number is not None and number[0] == 0
