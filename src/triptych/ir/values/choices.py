"""Tensors that hold a few numbers only: `mask.float()`, `1 - m`, `(m - 1) * 1e9`, `where(mask, 0, -inf)`.

`levels` gives the numbers. `choice` also gives the mask that selects one of two numbers for each element.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..calls import Call
from ..dtypes import rounded
from ..facts import known_equal, tensor_fact
from ..program import Program
from .equality import same_value
from .knowledge import knowledge
from .shape_only import SAME_ELEMENTS

SAME_PLACES = frozenset("alias clone detach contiguous lift_fresh_copy".split())
EXACT_INTEGERS = 2**31
COMBINATIONS = 32
"""How many combinations of its operands' numbers an operation is computed for."""


# ---- which numbers ----


def never_infinite(program: Program, node: Node) -> bool:
    """Is every element proved to be a finite number? It is where booleans choose between finite numbers."""
    numbers = levels(program, node)
    return numbers is not None and all(math.isfinite(n) for n in numbers)


def levels(program: Program, value: Any, depth: int = 12) -> set[float] | None:
    """All numbers that the elements of a tensor may be, if they are few; NaN is none of them."""
    number = knowledge(program).number(value)
    if number is not None:
        return None if math.isnan(number) else {float(number)}
    tensor, call = tensor_fact(value), program.call(value) if isinstance(value, Node) else None
    if tensor is None or depth == 0 or program.aliasing.written(value):
        return None
    if tensor.dtype == torch.bool:
        return {0.0, 1.0}
    if call is None or call.mutates or (operation := _operation(call, tensor)) is None:
        return None
    names, compute = operation
    operands: list[set[float]] = []
    for name in names:
        operand = levels(program, call.args[name], depth - 1)
        if operand is None:
            return None
        operands.append(operand)
    if math.prod(map(len, operands)) > COMBINATIONS:
        return None
    numbers = _numbers(compute, itertools.product(*operands), tensor.dtype)
    return None if numbers is None else set(numbers)


# ---- by which mask ----


@dataclass(frozen=True)
class Choice:
    """`where(mask, high, low)`, followed by views."""

    mask: Node
    """A boolean tensor, or one whose elements are proved to be 1 or 0."""
    low: float = 0.0
    high: float = 1.0
    views: tuple[Call, ...] = ()

    @property
    def is_mask(self) -> bool:
        return {self.low, self.high} == {0.0, 1.0}

    def same_places(self, program: Program, other: Choice) -> bool:
        """Do both choose by the same mask, element by element?"""
        if len(self.views) != len(other.views) or not same_value(program, self.mask, other.mask):
            return False
        return all(_same_view(program, a, b) for a, b in zip(self.views, other.views))


def choice(program: Program, node: Any, depth: int = 12) -> Choice | None:
    """The two numbers that a tensor holds and the mask that says where, if it is proved to be so."""
    tensor, call = tensor_fact(node), program.call(node) if isinstance(node, Node) else None
    if tensor is None or depth == 0 or tensor.requires_grad or program.aliasing.written(node):
        return None
    computed = _computed(program, call, tensor, depth - 1) if call is not None and not call.mutates else None
    if computed is not None:
        return computed
    return Choice(node) if tensor.dtype == torch.bool or _is_zero_or_one(program, node, tensor) else None


def _computed(program: Program, call: Call, tensor: torch.Tensor, depth: int) -> Choice | None:
    if call.op in SAME_ELEMENTS - SAME_PLACES:
        inner = choice(program, call.args["self"], depth)
        return None if inner is None else replace(inner, views=(*inner.views, call))
    if (operation := _operation(call, tensor)) is None:
        return None
    names, compute = operation
    operands: list[Choice | float] = []
    for name in names:
        number = knowledge(program).number(call.args[name])
        operand = choice(program, call.args[name], depth) if number is None else float(number)
        if operand is None:
            return None
        operands.append(operand)
    choices = [o for o in operands if isinstance(o, Choice)]
    if not choices or not all(choices[0].same_places(program, o) for o in choices[1:]):
        return None
    whole = [tensor_fact(call.args[n]) for n, o in zip(names, operands) if o is choices[0]]
    if whole[0] is None or not known_equal(whole[0].shape, tensor.shape):
        return None
    sides = ([getattr(o, side) if isinstance(o, Choice) else o for o in operands] for side in ("low", "high"))
    numbers = _numbers(compute, sides, tensor.dtype)
    return None if numbers is None else replace(choices[0], low=numbers[0], high=numbers[1])


def _is_zero_or_one(program: Program, node: Node, tensor: torch.Tensor) -> bool:
    """Is every element proved to be 0 or 1, as in a triangle of ones or in an integer mask?"""
    if tensor.dtype.is_complex or tensor.layout != torch.strided:
        return False
    know = knowledge(program)
    elements = know.elements(node)
    if not tensor.dtype.is_floating_point:
        return know.interval(node).within(0, 1)
    if elements is not None and all(isinstance(x, torch.Tensor) and x.item() in (0, 1) for _, x in elements.pieces):
        return True
    value = know.evaluate(node)
    return value is not None and bool(((value == 0) | (value == 1)).all())


def _same_view(program: Program, left: Call, right: Call) -> bool:
    names = {*left.args, *right.args} - {"self"}
    return left.op == right.op and all(
        n in left.args and n in right.args and same_value(program, left.args[n], right.args[n]) for n in names
    )


# ---- arithmetic on numbers ----


def _numbers(
    compute: Callable[..., Any], operands: Iterable[Sequence[float]], dtype: torch.dtype
) -> list[float] | None:
    """The result for each row of operands, rounded to the dtype; None if one is NaN or an inexact integer."""
    numbers = []
    for row in operands:
        try:
            number = float(compute(*row))
        except (ZeroDivisionError, OverflowError):
            return None
        if dtype.is_floating_point:
            number = rounded(number, dtype)
        elif not number.is_integer() or abs(number) >= EXACT_INTEGERS or number != rounded(number, dtype):
            return None
        if math.isnan(number):
            return None
        numbers.append(number)
    return numbers


def _operation(call: Call, result: torch.Tensor) -> tuple[Sequence[str], Callable[..., Any]] | None:
    """The operands of an operation by name, and the same operation on Python numbers."""
    if call.op == "to" or call.op in SAME_ELEMENTS:
        return ("self",), lambda number: number
    names, compute = OPERATIONS.get(call.op, ((), None))
    if compute is None or call.get("alpha") not in (1, None) or call.get("rounding_mode") is not None:
        return None
    if (result.dtype == torch.bool) != (call.op in TO_BOOLEAN):  # `~` of an integer is not a logical negation
        return None
    return (names, compute) if set(names) <= set(call.args) else None


def _chosen(condition: float, left: float, right: float) -> float:
    return left if condition else right


def _filled(value: float, condition: float, fill: float) -> float:
    return fill if condition else value


TWO = ("self", "other")
OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "add": (TWO, operator.add),
    "sub": (TWO, operator.sub),
    "rsub": (TWO, lambda a, b: b - a),
    "mul": (TWO, operator.mul),
    "div": (TWO, operator.truediv),
    "neg": (("self",), operator.neg),
    **{name: (TWO, getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_not": (("self",), operator.not_),
    "bitwise_not": (("self",), operator.not_),
    "where": (("condition", *TWO), _chosen),
    "masked_fill": (("self", "mask", "value"), _filled),
}
TO_BOOLEAN = frozenset("eq ne lt le gt ge logical_not bitwise_not".split())
