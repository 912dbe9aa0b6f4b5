"""Writes `x[mask] = number` as `masked_fill`, and `x[:] = y` as a copy of y."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.clones import copied_as
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule
from .spellings import torch_level_nodes

WHOLE = slice(None)


class MaskedWrite(Rule):
    """index_put(x, [mask], number) -> masked_fill(x, mask, number)"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in torch_level_nodes(program):
            call = program.call(node)
            by_mask = writes_by_mask(call) if call is not None and not call.mutates else None
            if by_mask is not None:
                yield Match.at(program, node, call=call, by_mask=by_mask)

    def rewrite(self, op, call, by_mask):
        place, mask = by_mask
        return as_masked_fill(op, call, place, mask.node)

    examples = [
        fires(lambda x, m: x.index_put((m,), x.new_tensor(2)), "f32[4, 8]", "bool[4]", dialects=["torch"]),
        declines(lambda x, m, y: x.index_put((m,), y), "f32[4, 8]", "bool[4]", "f32[8]", dialects=["torch"],
                 because="more than one number"),
        declines(lambda x, i: x.index_put((i,), x.new_tensor(2)), "f32[4, 8]", "i64[4]", dialects=["torch"]),
        declines(lambda x, m: x.index_put((m,), x.new_tensor(2)), "f32[4, 8]", "bool[4]", dialects=["aten"]),
    ]  # fmt: skip


def writes_by_mask(call: Call) -> tuple[int, Node] | None:
    """The first dim that is indexed and the mask, for an assignment with a single boolean mask as its index; None for
    any other index."""
    if call.op not in ("setitem", "index_put", "index_put_") or call.get("accumulate"):
        return None
    target = tensor_fact(call.args.get("self"))
    if target is None:
        return None
    index = call.args["index" if call.op == "setitem" else "indices"]
    entries = list(index) if isinstance(index, (list, tuple)) else [index]
    if isinstance(index, list) and call.op == "setitem":
        return None  # a list of numbers, or of masks that are stacked
    masks = [e for e in entries if isinstance(e, Node)]
    if len(masks) != 1 or (mask := tensor_fact(masks[0])) is None or mask.dtype != torch.bool or not mask.dim():
        return None
    if call.op == "setitem":
        if any(not (e is masks[0] or e is Ellipsis or e == WHOLE) for e in entries):
            return None
    elif any(not (e is masks[0] or e is None) for e in entries):
        return None
    place = entries.index(masks[0])
    if Ellipsis in entries[:place]:
        place = target.dim() - mask.dim() - (len(entries) - place - 1)
    return place, masks[0]


def writes_all(call: Call) -> bool:
    """Is every element written, by slices that leave none out?"""
    target = tensor_fact(call.args.get("self")) if call.op == "setitem" else None
    if target is None or not isinstance(call.args["value"], Node):
        return False
    index = call.args["index"]
    entries = index if isinstance(index, tuple) else (index,)
    if entries == (Ellipsis,):
        return True
    return len(entries) <= target.dim() and all(_is_all(e, size) for e, size in zip(entries, target.shape))


def _is_all(entry: Any, size: Any) -> bool:
    if not isinstance(entry, slice) or entry.step not in (None, 1) or entry.start not in (None, 0):
        return False
    return entry.stop is None or (isinstance(entry.stop, int) and isinstance(size, int) and entry.stop >= size)


def as_copy(op: Emitter, call: Call) -> Value:
    """The assigned value as a new tensor with the layout of x"""
    target, value = Value(op.program, call.args["self"]), Value(op.program, call.args["value"])
    if not value.is_tensor or value.device != target.device:
        at = value.node if isinstance(value.node, Node) else None
        raise Refused("the assigned value is not a tensor on the same device", at=at, wanted=target.device)
    value = value if value.dtype == target.dtype else op.to(value, dtype=target.dtype)
    value = value if known_equal(value.shape, target.shape) else op.expand(value, target.shape)
    return copied_as(op, value, target.tensor)  # type: ignore[arg-type]


def as_masked_fill(op: Emitter, call: Call, place: int, mask: Node) -> Value:
    """masked_fill(x, mask, number), with the mask's axes at the position that the mask has in the index"""
    program = op.program
    target, where, value = Value(program, call.args["self"]), Value(program, mask), _filled(call)
    trailing = target.rank - place - where.rank
    if place < 0 or trailing < 0 or not known_equal(where.shape, target.shape[place : place + where.rank]):
        sentence = "the mask has another shape than the dims that it indexes"
        raise Refused(sentence, at=mask, wanted=target.shape, found=where.shape)
    number = tensor_fact(value)
    if number is not None and number.dim() != 0:
        raise Refused("more than one number is written", at=value, found=number.shape)
    if number is not None and number.dtype != target.dtype:
        raise Refused(
            "a {found} number is assigned to a {wanted} tensor", at=value, wanted=target.dtype, found=number.dtype
        )
    if trailing:
        where = op.reshape(where, [*where.shape, *[1] * trailing])
    return op.masked_fill(target, where, value)


def _filled(call: Call) -> Any:
    value = call.args["value" if call.op == "setitem" else "values"]
    if isinstance(value, (bool, int, float)) or isinstance(value, Node):
        return value
    raise Refused("the assigned value is not a number")
