"""Patterns are written without knowing ranks. Negative dims, transposes and indices in a pattern are converted by the
rank of a call's operand before they are compared with that call."""

from __future__ import annotations

from typing import Any

from ..ir.calls import Call
from ..ir.facts import tensor_fact
from .pattern import Constant, ListOf, Operation, Pattern

DIMS = frozenset(["dim", "dims", "dim0", "dim1", "start_dim", "end_dim"])
ADDS_A_DIM = frozenset(["unsqueeze", "stack"])


def by_rank(name: str, wanted: Pattern, call: Call) -> Pattern:
    """The pattern of an argument, with dims counted from the front and a size of -1 filled in."""
    if name in DIMS:
        rank = _rank(call) if _is_negative(wanted) else None
        wanted = wanted if rank is None else _counted(wanted, rank)
        one_of_several = type(getattr(wanted, "value", None)) is int and isinstance(call.args.get(name), (list, tuple))
        return ListOf((wanted,)) if one_of_several else wanted  # `sum(x, 1)` is read as a sum over [1]
    if call.op == "reshape" and name == "shape" and _is_negative(wanted):
        return _sized(wanted, call.args.get("shape"))
    return wanted


def by_name(pattern: Operation, call: Call) -> Operation | None:
    """The pattern converted to the operation that the call is read as; None if that is not possible."""
    if pattern.op == "transpose" and call.op == "permute":
        order = list(range(len(call.args["dims"])))
        one, other = (getattr(pattern.args.get(name), "value", None) for name in ("dim0", "dim1"))
        if not all(isinstance(d, int) and -len(order) <= d < len(order) for d in (one, other)):
            return None
        order[one], order[other] = order[other], order[one]  # type: ignore[index]
        return Operation("permute", {"self": pattern.args["self"], "dims": Constant(order)})
    if pattern.op == "getitem" and call.op == "select":
        index = pattern.args.get("index")
        items = index.items if isinstance(index, ListOf) else (index,)
        values: list[Any] = [getattr(item, "value", None) for item in items]
        chosen = [(place, value) for place, value in enumerate(values) if value != slice(None)]
        if len(chosen) != 1 or type(chosen[0][1]) is not int:
            return None
        ((dim, place),) = chosen
        known = tensor_fact(call.args["self"])
        place = place if place >= 0 or known is None else place + known.shape[dim]
        return Operation("select", {"self": pattern.args["self"], "dim": Constant(dim), "index": Constant(place)})
    return None


def _is_negative(wanted: Pattern) -> bool:
    if isinstance(wanted, ListOf):
        return any(map(_is_negative, wanted.items))
    value = getattr(wanted, "value", None)
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(type(v) is int and v < 0 for v in values)


def _rank(call: Call) -> int | None:
    operand: Any = call.args.get("self", call.args.get("input", call.args.get("tensors")))
    known = tensor_fact(operand[0] if isinstance(operand, (list, tuple)) and operand else operand)
    return None if known is None else known.dim() + (call.op in ADDS_A_DIM)


def _counted(wanted: Pattern, rank: int) -> Pattern:
    if isinstance(wanted, ListOf):
        return ListOf(tuple(_counted(item, rank) for item in wanted.items))
    if not isinstance(wanted, Constant):
        return wanted
    if isinstance(wanted.value, (list, tuple)):
        return Constant([d + rank if type(d) is int and d < 0 else d for d in wanted.value])
    return Constant(wanted.value + rank if type(wanted.value) is int and wanted.value < 0 else wanted.value)


def _sized(wanted: Pattern, shape: Any) -> Pattern:
    """The pattern with -1 replaced by the call's size at that position. The number of elements is fixed, so that is the
    size that -1 stands for."""
    items = wanted.items if isinstance(wanted, ListOf) else ()
    values = [getattr(item, "value", None) for item in items] or getattr(wanted, "value", None)
    if not isinstance(values, (list, tuple)) or not isinstance(shape, (list, tuple)) or len(values) != len(shape):
        return wanted
    if not items:
        return Constant([now if want == -1 else want for want, now in zip(values, shape)])
    return ListOf(tuple(Constant(now) if want == -1 else item for item, want, now in zip(items, values, shape)))
