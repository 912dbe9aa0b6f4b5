"""Replaces in-place writes that nothing else can see by out-of-place operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..ir.traits import is_pointwise
from ..rewrite import edits
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule
from .masked_writes import as_copy, as_masked_fill, writes_all, writes_by_mask
from .spellings import torch_level_nodes

ELEMENTWISE = frozenset(["masked_fill", "tril", "triu"])
"""Operations that work element by element but are not tagged as pointwise by torch; their in-place forms are handled
like those of pointwise operations."""


def _may_make_new(call: Call) -> bool:
    return call.op.endswith("_") and (is_pointwise(call.op[:-1]) or call.op[:-1] in ELEMENTWISE)


def _written_twice(x: Any) -> Any:
    y = x * 2
    y.add_(1)
    y.relu_()
    return y + 1


class TakeResults(Rule):
    """x.add_(1); x.mul_(2) -> x.add_(1).mul_(2), where x is new memory

    Later users of x read the result of the last write before them instead. So each result has few users.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            if not program.aliasing.written(node) or not program.aliasing.is_fresh(node):
                continue
            writes = frozenset(user for user in node.users if _returns(program, user, node))
            if len(writes) > 1:
                yield Match.at(program, node, writes=writes)

    def rewrite(self, op, m, writes):
        return edits.TakeResults(m.root.node, writes)

    examples = [
        fires(_written_twice, "f32[4]", dialects=["torch"]),
        declines(lambda x: (x.add_(1), x.relu_(), x + 1)[2], "f32[4]", dialects=["torch"]),
        declines(lambda x: (x * 2).add_(1).relu_(), "f32[4]", dialects=["torch"]),
    ]


def _returns(program: Program, write: Node, written: Node) -> bool:
    """Does the call write this operand and return it?"""
    call = program.call(write)
    if call is None or not call.mutates or not _may_make_new(call) or call.args.get("self") is not written:
        return False
    return tensor_fact(write) is not None and not program.aliasing.surely_apart(write, written)


def _masked_write(x: Any, mask: Any) -> Any:
    y = x + 1
    y[mask] = -2.0
    return y


def _whole_write(x: Any, bias: Any) -> Any:
    y = x + 1
    y[:, 0:] = y[:, 0:].view(4, 2, 4).add(bias).view(4, 8)
    return y * 2


def _write_a_view(x: Any) -> Any:
    y = x * 2
    y.view(-1).relu_()
    return y


class OutOfPlace(Rule):
    """x.relu_() -> relu(x), x[mask] = 0 -> masked_fill(x, mask, 0), x[:] = y -> y, where nothing else can see
    the memory of x"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            call = program.call(node)
            if call is not None and call.mutates:
                by_mask, whole = writes_by_mask(call), writes_all(call)
                if by_mask is not None or whole or _may_make_new(call):
                    yield Match.at(program, node, call=call, by_mask=by_mask, whole=whole)

    def rewrite(self, op, m, call, by_mask, whole):
        try:
            if by_mask is not None:
                place, mask = by_mask
                value = as_masked_fill(op, call, place, mask.node)
            else:
                value = as_copy(op, call) if whole else _new_value(op, call)
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"the operation has no out-of-place form: {error}") from error
        return edits.WriteToNewMemory(m.root.node, value)

    examples = [
        fires(lambda x: F.relu(x + 1, inplace=True), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, y: torch.exp(x).add_(y), "bf16[4, 8]", "f32[8]", dialects=["torch"]),
        fires(lambda x: torch.exp(x).add_(1, alpha=3).clamp_(max=2).t(), "f32[4, 8]", dialects=["torch"]),
        fires(lambda x, y: x.exp().mul_(y), "f32[4, 8]", "f64[8]", dialects=["torch"]),
        fires(lambda x: (lambda y: (y.relu_(), y))(x * 2), "f32[4]", dialects=["torch"]),
        fires(lambda x, y: (x * 2).masked_fill_(y, 0), "f32[4, 8]", "bool[8]", dialects=["torch"]),
        fires(_masked_write, "f32[4, 8]", "bool[4]", dialects=["torch"]),
        fires(_whole_write, "f32[4, 8]", "f32[4]", dialects=["torch"]),
        fires(_masked_write, "f32[4, 8]", "bool[4, 8]", dialects=["torch"], dynamic=True),
        fires(lambda x: (lambda y: (y.sum(), y.relu_(), y.exp(), y))(x * 2), "f32[4]", dialects=["torch"]),
        fires(lambda x: x.relu().mul_(2), "f32[4]", dialects=["torch"]),
        declines(lambda x: x.relu_(), "f32[4]", dialects=["torch"], because="others see the memory"),
        declines(_write_a_view, "f32[4, 8]", dialects=["torch"], because="others see the memory"),
        declines(lambda x: x.relu(), "f32[4]"),
    ]  # fmt: skip


def _new_value(op: Emitter, call: Call) -> Any:
    """The result of an in-place operation as a new value: computed in the promoted dtype, then rounded to the dtype of
    the tensor that was written."""
    value = getattr(op, call.op[:-1])(**call.args)
    written = tensor_fact(call.args["self"]) if "self" in call.args else None
    if written is None or not value.is_float or not written.dtype.is_floating_point or value.dtype == written.dtype:
        return value
    return op.to(value, dtype=written.dtype)
