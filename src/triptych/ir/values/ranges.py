"""Interval analysis: bounds on the elements of a value where no pattern says what they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..calls import Call
from ..dtypes import rounded
from ..facts import number, numel, tensor_fact
from .affine import Affine
from .elements import Elements
from .shape_only import SAME_ELEMENTS

if TYPE_CHECKING:
    from ..values import Knowledge

Number = int | float


@dataclass(frozen=True)
class Interval:
    """Every element is at least `low` and at most `high`, or NaN if `nan` is set."""

    low: Number
    high: Number
    nan: bool = False

    def within(self, low: Number, high: Number) -> bool:
        return low <= self.low and self.high <= high

    def joined(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high), self.nan or other.nan)


@functools.cache
def of_dtype(dtype: torch.dtype) -> Interval:
    """The interval of all values of a dtype."""
    if dtype == torch.bool:
        return Interval(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return Interval(-math.inf, math.inf, nan=True)
    limits = torch.iinfo(dtype)
    return Interval(limits.min, limits.max)


def of_elements(elements: Elements, result: torch.Tensor) -> Interval:
    """The interval of known elements; a symbolic bound counts as unbounded."""
    union: Interval | None = None
    widest = of_dtype(result.dtype)
    for _, leaf in elements.pieces:
        if isinstance(leaf, Affine):
            low, high = leaf.least(result.shape), leaf.most(result.shape)
            if any(type(s) is int and s == 0 for s in result.shape):
                return widest
            here = Interval(low if type(low) is int else widest.low, high if type(high) is int else widest.high)
        else:
            value = leaf.item()
            here = widest if math.isnan(value) else Interval(value, value)
        union = here if union is None else union.joined(here)
    return union or widest


def has_range(call: Call, result: torch.Tensor) -> bool:
    """Can the operands say more about the interval of a result than its dtype does?"""
    if call.mutates or call.op not in RANGES:
        return False
    return RANGES[call.op] is not _integer or not result.dtype.is_floating_point


def interval(know: Knowledge, node: Node, call: Call, result: torch.Tensor) -> Interval:
    """The interval of a result, from those of the operands."""
    widest = of_dtype(result.dtype)
    compute = RANGES.get(call.op)
    computed = compute(know, call, result) if compute is not None else None
    if computed is None:
        return widest
    if not result.dtype.is_floating_point and not computed.within(widest.low, widest.high):
        return widest  # it may wrap around
    return computed


Range = Callable[["Knowledge", Call, torch.Tensor], "Interval | None"]


def _of(know: Knowledge, value: Any, dtype: torch.dtype) -> Interval | None:
    """The interval of an operand, if converting it to the dtype of the result is exact."""
    fact = tensor_fact(value)
    if fact is not None:
        operand = know.interval(value)
        return operand if fact.dtype == dtype or not dtype.is_floating_point else None
    value = number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    exact = dtype.is_floating_point or isinstance(value, int)
    return Interval(value, value) if exact and representable(value, dtype) else None


def representable(value: Number, dtype: torch.dtype) -> bool:
    """Does the dtype represent this number exactly?"""
    if not dtype.is_floating_point:
        widest = of_dtype(dtype)
        return isinstance(value, int) and widest.low <= value <= widest.high
    return rounded(value, dtype) == value


def _same(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    return _of(know, call.args.get("self"), result.dtype)


def _to(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    source = tensor_fact(call.args.get("self"))
    if source is None or source.dtype.is_floating_point and not result.dtype.is_floating_point:
        return None
    operand = know.interval(call.args["self"])
    if not result.dtype.is_floating_point:
        return operand
    low, high = (rounded(float(n), result.dtype) for n in (operand.low, operand.high))
    return Interval(low, high, operand.nan)  # rounding keeps the order


def _join(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    names = {"where": ("self", "other"), "masked_fill": ("self", "value")}
    operands = call.args.get("tensors") if call.op == "cat" else [call.args.get(n) for n in names[call.op]]
    intervals = [_of(know, o, result.dtype) for o in operands or ()]
    if not intervals or any(h is None for h in intervals):
        return None
    union = intervals[0]
    for other in intervals[1:]:
        union = union.joined(other)  # type: ignore[union-attr, arg-type]
    return union


def _clamp(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    operand = _of(know, call.args.get("self"), result.dtype)
    if operand is None:
        return None
    low, high = operand.low, operand.high
    for name, choose in (("min", max), ("max", min)):
        if name in call.args and call.args[name] is not None:
            bound = _of(know, call.args[name], result.dtype)
            if bound is None or bound.nan:
                return None
            low, high = choose(low, bound.low), choose(high, bound.high)
    return Interval(low, high, operand.nan)


def _relu(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    operand = _of(know, call.args.get("self"), result.dtype)
    return None if operand is None else Interval(max(operand.low, 0), max(operand.high, 0), operand.nan)


def _sigmoid(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    return Interval(0, 1, nan=True) if result.dtype.is_floating_point else None


def _exp(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    return Interval(0, math.inf, nan=True) if result.dtype.is_floating_point else None


def _abs(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    operand = _of(know, call.args.get("self"), result.dtype)
    if operand is None or not result.dtype.is_floating_point and operand.low == of_dtype(result.dtype).low:
        return None  # the smallest integer has no opposite
    low = 0 if operand.low <= 0 <= operand.high else min(abs(operand.low), abs(operand.high))
    return Interval(low, max(abs(operand.low), abs(operand.high)), operand.nan)


def _extreme(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    left, right = (_of(know, call.args.get(n), result.dtype) for n in ("self", "other"))
    if left is None or right is None:
        return None
    choose = max if call.op in ("maximum", "max") else min
    return Interval(choose(left.low, right.low), choose(left.high, right.high), left.nan or right.nan)


def _integer(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    """Sums and products of integers."""
    if result.dtype.is_floating_point or result.dtype == torch.bool or "alpha" in call.args:
        return None
    left, right = (_of(know, call.args.get(n), result.dtype) for n in ("self", "other"))
    if left is None or right is None:
        return None
    if call.op == "add":
        return Interval(left.low + right.low, left.high + right.high)
    if call.op == "sub":
        return Interval(left.low - right.high, left.high - right.low)
    corners = [a * b for a in (left.low, left.high) for b in (right.low, right.high)]
    return Interval(min(corners), max(corners))


def _rest(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    """The remainder of a division by a positive number, and `&` with one."""
    by = number(call.args.get("other"))
    if result.dtype.is_floating_point or type(by) is not int or by <= 0 or not representable(by, result.dtype):
        return None
    return Interval(0, by - 1 if call.op == "remainder" else by)


def _place(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    source = tensor_fact(call.args.get("self"))
    if source is None:
        return None
    dim = call.args.get("dim")
    size = numel(source.shape) if dim is None else source.shape[dim] if source.dim() else 1
    return Interval(0, size - 1 if type(size) is int and size > 0 else 2**62)


def _count(know: Knowledge, call: Call, result: torch.Tensor) -> Interval | None:
    source = tensor_fact(call.args.get("self"))
    if source is None or source.dtype != torch.bool or result.dtype != torch.int64:
        return None
    size = numel(source.shape)
    return Interval(0, size if type(size) is int else 2**62)


RANGES: dict[str, Range] = {
    **dict.fromkeys(SAME_ELEMENTS, _same),
    **dict.fromkeys(("tensor_getitem", "identity", "index", "gather", "amax", "amin"), _same),
    **dict.fromkeys(("where", "masked_fill", "cat"), _join),
    **dict.fromkeys(("add", "sub", "mul"), _integer),
    **dict.fromkeys(("maximum", "minimum", "max", "min"), _extreme),
    **dict.fromkeys(("remainder", "bitwise_and"), _rest),
    **dict.fromkeys(("argmax", "argmin"), _place),
    **dict.fromkeys(("sum", "cumsum", "count_nonzero"), _count),
    "to": _to,
    "clamp": _clamp,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "exp": _exp,
    "abs": _abs,
}


def always(op: str, left: Interval, right: Interval) -> bool | None:
    """Is a comparison true (or false) for all numbers of two intervals? None if it depends on the numbers."""
    if op in ("gt", "ge"):
        op, left, right = {"gt": "lt", "ge": "le"}[op], right, left
    nan = left.nan or right.nan  # NaN is unequal to all numbers, and neither smaller nor larger
    if op in ("eq", "ne"):
        apart = left.high < right.low or right.high < left.low
        equal = left.low == left.high == right.low == right.high and not nan
        return None if not (apart or equal) else equal == (op == "eq")
    below = left.high < right.low or op == "le" and left.high <= right.low
    above = left.low > right.high or op == "lt" and left.low >= right.high
    if below and not nan:
        return True
    return False if above else None
