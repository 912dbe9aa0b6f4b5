"""Tensors that hold one of two numbers, by a mask: `mask.float()`, `1 - m`, `(m - 1) * 1e9`, `where(mask, 0, -inf)`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.values import knowledge
from ..rewrite.emit import Emitter
from .masks import SAME_ELEMENTS, one_number, rounded, same_argument, same_value

SAME_PLACES = frozenset("clone detach contiguous".split())
EXACT_INTEGERS = 2**31


@dataclass(frozen=True)
class Choice:
    """`where(mask, high, low)`, behind views of it."""

    mask: Node
    """What is true or false, or proved to be 1 or 0."""
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


def kept_by(op: Emitter, node: Node) -> Value:
    """Where a tensor of zeros and ones is one, as a boolean."""
    call = op.program.call(node)
    inner = call.args["self"] if call is not None and call.op == "to" and not call.mutates else None
    tensor = tensor_fact(inner)
    if isinstance(inner, Node) and tensor is not None and tensor.dtype == torch.bool:
        return Value(op.program, inner)
    return op.ne(node, 0)


def _computed(program: Program, call: Call, tensor: torch.Tensor, depth: int) -> Choice | None:
    if call.op == "to" or call.op in SAME_ELEMENTS:
        inner = choice(program, call.args["self"], depth)
        if inner is None:
            return None
        if call.op in SAME_ELEMENTS - SAME_PLACES:
            return replace(inner, views=(*inner.views, call))
        return _on_both_sides(inner, lambda side: side, [inner], tensor.dtype)
    if call.op not in OPERATIONS:
        return None
    names, compute = OPERATIONS[call.op]
    if call.get("alpha") not in (1, None) or call.get("rounding_mode") is not None or not set(names) <= set(call.args):
        return None
    if (tensor.dtype == torch.bool) != (call.op in TO_BOOLEAN):  # `~` of an integer is no such thing
        return None
    operands: list[Choice | float] = []
    for name in names:
        operand = _operand(program, call.args[name], depth)
        if operand is None:
            return None
        operands.append(operand)
    choices = [o for o in operands if isinstance(o, Choice)]
    if not choices or not all(choices[0].same_places(program, o) for o in choices[1:]):
        return None
    whole = [tensor_fact(call.args[n]) for n, o in zip(names, operands) if o is choices[0]]
    if whole[0] is None or not known_equal(whole[0].shape, tensor.shape):
        return None
    return _on_both_sides(choices[0], compute, operands, tensor.dtype)


def _operand(program: Program, value: Any, depth: int) -> Choice | float | None:
    if isinstance(value, bool):
        return float(value)
    number = one_number(program, value)
    return number[0] if number is not None else choice(program, value, depth)


def _on_both_sides(
    first: Choice, compute: Callable[..., Any], operands: Sequence[Choice | float], dtype: torch.dtype
) -> Choice | None:
    """The numbers that come out for either side of the mask, as the dtype holds them."""
    numbers = []
    for side in ("low", "high"):
        try:
            number = float(compute(*(getattr(o, side) if isinstance(o, Choice) else o for o in operands)))
        except (ZeroDivisionError, OverflowError):
            return None
        if dtype.is_floating_point:
            number = rounded(number, dtype)
        elif not number.is_integer() or abs(number) >= EXACT_INTEGERS or number != rounded(number, dtype):
            return None
        if math.isnan(number):
            return None
        numbers.append(number)
    return replace(first, low=numbers[0], high=numbers[1])


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


def _is_zero_or_one(program: Program, node: Node, tensor: torch.Tensor) -> bool:
    """A triangle of ones, an integer between 0 and 1, and their like."""
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
        n in left.args and n in right.args and same_argument(program, left.args[n], right.args[n]) for n in names
    )
