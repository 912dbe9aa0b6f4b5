"""Arithmetic that changes nothing, by IEEE rules: infinities, NaN and the sign of zero stay as they are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.program import ATEN, Program
from ..ir.values.ranges import of_dtype
from ..match.pattern import Is, Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule
from .neutral import is_neutral, neutral_problem
from .noop_views import Noop

INFINITY = math.inf
SPECIAL = torch.tensor([-0.0, 0.0, INFINITY, -INFINITY, math.nan, 1.5, 1e-45, -3.0])
"""For examples: among others, the values for which the rules of real numbers do not hold."""

One = Annotated[Any, Is("one", lambda v: isinstance(v, (int, float)) and v == 1)]
ZeroOrOne = Annotated[Any, Is("zero or one", lambda v: isinstance(v, (int, float)) and v in (0, 1))]


class NeutralOperand(Noop, ABC):
    """f(x, n) -> x, for the number n that changes nothing, which is `neutral` in the table of operations"""

    @abstractmethod
    def pattern(self, op: Any) -> Any: ...

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        return isinstance(call.args.get("other"), (int, float)) or isinstance(call.args.get("self"), (int, float))

    def check(self, m: Match, x: Any, number: Any) -> None:
        call: Any = m.root.call
        m.applies(x.known and is_neutral(call, number, x.dtype), "the number may change the value")
        super().check(m, x)
        problem = neutral_problem(call.op, number, x.dtype)
        m.require(not problem, problem)


class AddZero(NeutralOperand):
    """x + 0 -> x, where x is an integer; for floats only x + -0.0 -> x"""

    def pattern(self, op, x: Tensor, number: ZeroOrOne):
        return op.add(x, number)

    examples = [
        fires(lambda x: (x + 0) * 2, "i64[4, 8]"),
        fires(lambda x: (0 + x) * 2, "i64[4, 8]"),
        fires(lambda x: (x + False) ^ True, "bool[4, 8]"),
        fires(lambda x: (x + -0.0) * 2, SPECIAL),
        declines(lambda x: (x + 0) * 2, SPECIAL, because="-0.0"),
        declines(lambda x: (x + 0.0) * 2, SPECIAL, because="-0.0"),
        declines(lambda x: (x + -0.0) * 2, torch.tensor([complex(1, -0.0)], dtype=torch.complex64), because="0i"),
        declines(lambda x: (x + 0.0) * 2, "i64[4, 8]"),
        declines(lambda x: (x + 0) * 2, "bool[4, 8]"),
        declines(lambda x: x + 0, "i64[4, 8]", because="leaves the graph"),
        declines(lambda x, y: torch.add(x, y, alpha=0) * 2, "i64[4, 8]", "i64[4, 8]"),
    ]


class SubtractZero(NeutralOperand):
    """x - 0 -> x"""

    def pattern(self, op, x: Tensor, number: ZeroOrOne):
        return op.sub(x, number)

    examples = [
        fires(lambda x: (x - 0) * 2, SPECIAL),
        fires(lambda x: (x - 0.0) * 2, "f16[4, 8]"),
        fires(lambda x: (x - 0) * 2, "i64[4, 8]"),
        declines(lambda x: (x - -0.0) * 2, SPECIAL, because="-0.0"),
        declines(lambda x: (0 - x) * 2, SPECIAL),
        declines(lambda x: (x - 0) * 2, torch.tensor([complex(1, -0.0)], dtype=torch.complex64), because="0i"),
        declines(lambda x: (x - 0.0) * 2, "i64[4, 8]"),
    ]


class MultiplyByOne(NeutralOperand):
    """x * 1 -> x"""

    def pattern(self, op, x: Tensor, number: ZeroOrOne):
        return op.mul(x, number)

    examples = [
        fires(lambda x: (x * 1) + 2, SPECIAL),
        fires(lambda x: (1.0 * x) + 2, "bf16[4, 8]"),
        fires(lambda x: (x * 1) + 2, "i64[4, 8]"),
        fires(lambda x: (x * True) ^ True, "bool[4, 8]"),
        fires(lambda x: (x * 1) + 2, "f32[]"),
        declines(lambda x: (x * 1.0) + 2, "i64[4, 8]"),
        declines(lambda x: (x * 1) + 2, "bool[4, 8]"),
        declines(lambda x: x * 1, "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: (x * 1) + 2, torch.tensor([complex(1, INFINITY)], dtype=torch.complex64), because="NaN"),
        declines(lambda x: _after_no_grad(x) + 2, "f32[4, 8]", because="used beyond", dialects=("torch",)),
    ]


def _after_no_grad(x: Any) -> Any:
    with torch.no_grad():
        y = x * 1
    return y


class DivideByOne(NeutralOperand):
    """x / 1 -> x, where x is a float; x // 1 -> x, where x is an integer"""

    def pattern(self, op, x: Tensor, number: ZeroOrOne, rounding):
        return op.div(x, number, rounding_mode=rounding) | op.floor_divide(x, number)

    examples = [
        fires(lambda x: (x / 1) + 2, SPECIAL),
        fires(lambda x: (x / 1.0) + 2, "f16[4, 8]"),
        fires(lambda x: (x // 1) + 2, "i64[4, 8]"),
        declines(lambda x: (x / 1) + 2, "i64[4, 8]"),
        declines(lambda x: (x // 1) + 2, "f32[4, 8]"),
        declines(lambda x: (1 / x) + 2, "f32[4, 8]"),
        declines(lambda x: torch.div(x, 1, rounding_mode="trunc") + 2, "f32[4, 8]"),
    ]


class PowerOne(Noop):
    """x ** 1 -> x"""

    def pattern(self, op, x: Tensor, one: One):
        return op.pow(x, one)

    examples = [
        fires(lambda x: (x**1) + 2, SPECIAL),
        fires(lambda x: torch.pow(x, 1) + 2, "i64[4, 8]"),
        declines(lambda x: torch.pow(x, 1.0) + 2, "i64[4, 8]"),
        declines(lambda x: torch.pow(1, x) + 2, "f32[4, 8]"),
        declines(lambda x: (x**2) + 2, "f32[4, 8]"),
    ]


class DoubleNegation(Noop):
    """-(-x) -> x; not not x -> x"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor):
        return op.any_of(*(getattr(op, n)(getattr(op, n)(x)) for n in ("neg", "logical_not", "bitwise_not")))

    examples = [
        fires(lambda x: x.neg().neg() + 2, SPECIAL),
        fires(lambda x: (y := -x, -y + 2), "f32[4, 8]"),
        fires(lambda x: x.logical_not().logical_not() ^ True, "bool[4, 8]"),
        fires(lambda x: ~~x + 2, "i64[4, 8]"),
        declines(lambda x: x.logical_not().logical_not() ^ True, "i64[4, 8]"),
        declines(lambda x: x.neg().neg(), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: (y := -x, y.add_(1), -y + 2)[-1], "f32[4]", because="writes", dialects=("torch",)),
    ]


IDEMPOTENT = ("relu", "abs", "floor", "ceil", "trunc", "round", "sign")


class Idempotent(Rule):
    """f(f(x)) -> f(x), for f = relu, abs, floor, ceil, trunc, round, sign"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor):
        return op.any_of(*(getattr(op, n)(getattr(op, n)(x)) for n in IDEMPOTENT))

    def rewrite(self, op, m):
        return m.nodes[1]

    examples = [
        fires(lambda x: x.relu().relu() + 2, SPECIAL),
        fires(lambda x: torch.nn.functional.relu(torch.relu(x)), "f32[4, 8]"),
        fires(lambda x: (x * 3).round().round() + 2, "f32[4, 8]"),
        declines(lambda x: x.relu().abs() + 2, "f32[4, 8]"),
        declines(lambda x: x.round(decimals=1).round() + 2, "f32[4, 8]"),
        declines(lambda x: (y := x.relu(), y.relu()), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: (y := x.relu(), y.sub_(1), y.relu())[-1], "f32[4, 8]", because="writes",
                 dialects=("torch",)),
    ]  # fmt: skip


class ClampToAnything(Noop):
    """clamp(x, min, max) -> x, where every value of x's dtype is within the bounds; NaN stays NaN

    Before autograd the rule declines floats: where x is NaN, clamp passes a gradient of 0 on, and x itself the whole
    gradient.
    """

    def pattern(self, op, x: Tensor, low, high):
        return op.clamp(x, min=low, max=high)

    def check(self, m, x, low, high):
        super().check(m, x)
        m.require(x.known, "shape and dtype are not known")
        m.applies(_is_bound(low) and _is_bound(high), "the bounds may change a value")
        bounds = -INFINITY if low is None else low, INFINITY if high is None else high
        m.applies(of_dtype(x.dtype).within(*bounds), "the bounds may change a value")
        m.require(not x.is_float or m.program.dialect == ATEN, "the gradient at NaN would differ")

    examples = [
        fires(lambda x: x.clamp(-INFINITY, INFINITY) + 2, SPECIAL, dialects=("aten",)),
        fires(lambda x: x.clamp(min=0) + 2, "u8[4, 8]"),
        declines(lambda x: x.clamp(max=INFINITY) + 2, SPECIAL, dialects=("torch",), because="gradient"),
        declines(lambda x: x.clamp(min=torch.finfo(torch.float32).min) + 2, SPECIAL),
        declines(lambda x: x.clamp(max=INFINITY) + 2, "i64[4, 8]"),
        declines(lambda x: x.clamp_min(0) + 2, "i8[4, 8]"),
        declines(lambda x, low: x.clamp(low) + 2, "f32[4, 8]", "f32[8]"),
    ]


def _is_bound(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) and not isinstance(value, bool)


ARITHMETIC: list[Rule] = [
    AddZero(), SubtractZero(), MultiplyByOne(), DivideByOne(), PowerOne(), DoubleNegation(), Idempotent(),
    ClampToAnything(),
]  # fmt: skip
