"""Operations with an operand that holds one known number, or with itself: part of `constant_fold_uniform_value`.

`DecidedOperation` is the base of all rules for operations whose result the known values of their operands decide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.fx import Node

from .. import _private
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.operations import OPERATIONS, operation
from ..ir.program import TORCH, Program
from ..ir.traits import is_commutative, is_reduction
from ..ir.values.knowledge import as_number, knowledge
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.refusal import NotConcerned
from ..rewrite.rule import Match, Rule
from ..rules.neutral import is_neutral, neutral_problem, rounds

f32, f64 = torch.float32, torch.float64

Build = Callable[[Emitter], Any]
"""Emits the value that an operation is known to have."""


def number_of(program: Program, node: Node) -> torch.Tensor | None:
    """The number that all elements are equal to: known from the pattern of the value, or computed where the node is a
    reduction to one element that depends only on shapes and constants. None if it is not known."""
    call, fact = program.call(node), tensor_fact(node)
    if call is None or call.mutates or fact is None or program.aliasing.written(node):
        return None  # a tensor that is written in place may hold another number before the write
    value = knowledge(program).uniform(node)
    if value is None and is_reduction(call.op) and isinstance(fact.numel(), int) and fact.numel() == 1:
        computed = knowledge(program).evaluate(node)
        with _private.plain_torch():
            value = None if computed is None else computed.reshape(())
    return value


def numbers_used_here_alone(program: Program, node: Node) -> list[Node]:
    """Direct and indirect operands that hold one number and that nobody uses once this node is gone."""
    unused = {node: None}
    work = list(node.all_input_nodes)
    while work:
        operand = work.pop()
        if (
            operand not in unused
            and all(u in unused for u in operand.users)
            and number_of(program, operand) is not None
        ):
            unused[operand] = None
            work += operand.all_input_nodes
    return list(unused)[1:]


def full_like(op: Emitter, m: Match, number: bool | int | float) -> Any:
    """The value of a match as `full`."""
    like = m.root.tensor
    assert like is not None
    m.require(not like.requires_grad, "its gradient is requested")
    return op.full(list(like.shape), number, dtype=like.dtype, device=like.device)


class DecidedOperation(Rule, ABC):
    """An operation whose result the known values of its operands decide, but which is not one number itself."""

    ops: ClassVar[frozenset[str]]

    def pattern(self, op):
        return op.call_of(*self.ops)

    def check(self, m):
        node, call, result = m.root.node, m.root.call, m.root.tensor
        m.applies(result is not None and not result.dtype.is_complex)
        build = self.decide(Site(m, node, call, result))
        m.applies(build is not None and number_of(m.program, node) is None)
        m.leave_behind(numbers_used_here_alone(m.program, node))
        m.bindings["build"] = build

    @abstractmethod
    def decide(self, site: Site) -> Build | None:
        """How to emit the result; None if the known values do not decide it."""

    def rewrite(self, op, m):
        return m.bindings["build"](op)


class Site:
    """An operation for `DecidedOperation.decide`, with what is known of its operands."""

    def __init__(self, match: Match, node: Node, call: Call, result: torch.Tensor) -> None:
        self.match, self.node, self.call, self.result = match, node, call, result
        self.program = match.program
        self.knowledge = knowledge(match.program)

    def number(self, operand: Any) -> bool | int | float | None:
        """The number that all elements of an operand are equal to; None if there is none or it is not known."""
        if isinstance(operand, (bool, int, float)):
            return operand
        value = self.knowledge.uniform(operand)
        return None if value is None else as_number(value)

    def is_number(self, number: bool | int | float, dropped: Any) -> Build:
        """Decides that every element of the result is this number, whatever the operand `dropped` holds."""
        self._require_no_gradient(dropped)
        return lambda op: full_like(op, self.match, number)

    def is_operand(self, operand: Node, dropped: Any = None) -> Build:
        """Decides that the result is this operand, in the dtype and shape of the result, whatever `dropped` holds."""
        self._require_no_gradient(dropped)
        return lambda op: self._as_result(op, operand)

    def _require_no_gradient(self, dropped: Any) -> None:
        """Before autograd, an operand that is no longer used would have None for its gradient instead of zeros."""
        lost = tensor_fact(dropped)
        zeros = self.program.dialect == TORCH and lost is not None and lost.requires_grad
        at = dropped if isinstance(dropped, Node) else None
        self.match.require(not zeros, "its gradient of zeros would become None", at=at)

    def _as_result(self, op: Emitter, operand: Node) -> Any:
        """The operand in the dtype and shape of the result. In place of an operation on two tensors it is cloned if the
        caller would otherwise get the same memory twice; the copy costs less than the operation."""
        fact, result = tensor_fact(operand), self.result
        value: Any = self.program.value(operand)
        if fact is not None and fact.dtype != result.dtype:
            value = op.to(value, dtype=result.dtype)
        elif len(self.node.all_input_nodes) > 1 and self._would_be_shared(operand):
            value = op.clone(value)
        if fact is not None and not known_equal(fact.shape, result.shape):
            value = op.expand(value, list(result.shape))
        return value

    def _would_be_shared(self, operand: Node) -> bool:
        """Is the result an output of the graph, and the operand an input or an output itself?"""
        aliasing = self.program.aliasing
        return aliasing.is_output(self.node) and (aliasing.is_input(operand) or aliasing.is_output(operand))

    def with_number(self) -> tuple[Node, bool | int | float]:
        """The operands of a binary operation, of which one is a tensor and the other a known number."""
        left, right = self.call.args.get("self"), self.call.args.get("other")
        sides = ((left, right), (right, left)) if is_commutative(self.call.op) else ((left, right),)
        for operand, other in sides:
            number = self.number(other)
            if isinstance(operand, Node) and tensor_fact(operand) is not None and number is not None:
                return operand, number
        raise NotConcerned("no operand is a known number")

    @property
    def is_exact(self) -> bool:
        return not self.result.dtype.is_floating_point


def _may_be_number(program: Program, call: Call, number: Any) -> bool:
    """Is an operand this number, also as a boolean, or a tensor whose elements follow a pattern?"""
    for operand in (call.args.get("other"), call.args.get("self")):
        if isinstance(operand, Node):
            if knowledge(program).elements(operand) is not None:
                return True
        elif operand == number or operand == bool(number):
            return True
    return False


class NeutralNumber(DecidedOperation):
    """x + 0, x - 0, x * 1, x / 1, x & true, x | false, x ^ 0 -> x, where a tensor holds that number everywhere

    For floats x + 0.0 and x - -0.0 only where no element can be -0.0, which would become 0.0.
    """

    ops = frozenset(name for name, row in OPERATIONS.items() if row.neutral is not None)

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        return _may_be_number(program, call, operation(call.op).neutral)

    def decide(self, site: Site) -> Build | None:
        operand, number = site.with_number()
        if not is_neutral(site.call, number, site.result.dtype):
            return None
        problem = neutral_problem(site.call.op, number, site.result.dtype)
        site.match.require(not problem or site.knowledge.never_negative_zero(operand), problem, at=operand)
        return site.is_operand(operand)

    examples = [
        fires(lambda x: x * x.new_ones(4, 8) - x.new_zeros(8), "f32[4, 8]", dynamic=True),
        fires(lambda x: ((x * torch.ones(4, 8)).sin(), (x / 1).cos()), "f32[4, 1]"),
        fires(lambda x: x.relu() * torch.ones_like(x), "f32[4, 8]", dynamic=True),
        fires(lambda x: x.sin() + torch.full((8,), -0.0), "f32[4, 8]"),
        fires(lambda x: x.exp() + torch.zeros(8), "f32[4, 8]"),
        fires(lambda x: torch.rand_like(x) + torch.zeros(4, dtype=f64), "f32[4]"),
        fires(lambda x: (x + 0.0, x * 1.0, x * True), "i32[4, 8]"),
        fires(lambda x: torch.logical_and(x > 0, torch.ones(8, dtype=torch.bool)), "f32[4, 8]"),
        fires(lambda x: x // 1 + 1, "i64[4, 8]"),
        fires(lambda x: x * torch.ones(4), "f32[4]"),
        fires(lambda x: (y := x.sin(), y / torch.ones(4)), "f32[4]"),
        declines(lambda x: x.sin() + torch.zeros(8), "f32[4, 8]", because="-0.0"),
        declines(lambda x: x.sin() * torch.full((), 1.0001, dtype=f32), "bf16[4, 8]"),
        declines(lambda x: x * 1.0, "f32[4]", because="leaves the graph"),
    ]


class Absorb(DecidedOperation):
    """x * 0, x & 0, x | -1, x % 1 -> full(shape, number), of integers; x & false, x | true of booleans"""

    ops = frozenset(name for name, row in OPERATIONS.items() if row.absorbing is not None) | {"remainder"}

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        return call.op == "remainder" or _may_be_number(program, call, operation(call.op).absorbing)

    def decide(self, site: Site) -> Build | None:
        dtype = site.result.dtype
        if rounds(site.call, dtype):
            return None
        operand, number = site.with_number()
        if site.call.op == "remainder":
            return site.is_number(0, operand) if abs(number) == 1 else None
        absorbing: Any = operation(site.call.op).absorbing
        if dtype == torch.bool:
            absorbing = bool(absorbing)
        if number != absorbing or (absorbing < 0 and not dtype.is_signed):
            return None
        site.match.require(site.call.op != "mul" or site.is_exact, "0 times NaN or infinity is NaN")
        return site.is_number(absorbing, operand)

    examples = [
        fires(lambda x: (x + 1) * torch.zeros_like(x), "i64[4, 8]"),
        fires(lambda x: x % 1, "i64[4, 8]"),
        fires(lambda x: x | -1, "i64[4, 8]"),
        declines(lambda x: x | -1, "u8[4, 8]"),  # it is 255 there
        declines(lambda x: x.sin() * torch.zeros(8), "f32[4, 8]", because="NaN"),
        declines(lambda x: x % 2, "i64[4, 8]"),
    ]


WITH_ITSELF: dict[str, Any] = {
    "sub": 0, "bitwise_xor": 0, "bitwise_and": None, "bitwise_or": None, "eq": True, "ne": False,
}  # fmt: skip
"""The result of each operation on an integer or boolean and itself: a number, or None for the operand unchanged."""


class WithItself(DecidedOperation):
    """x - x, x ^ x -> 0; x & x, x | x -> x; x == x -> true; x != x -> false, of integers and booleans"""

    ops = frozenset(WITH_ITSELF)

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        return call.args.get("self") is call.args.get("other")

    def decide(self, site: Site) -> Build | None:
        operand: Any = site.call.args.get("self")
        fact = tensor_fact(operand)
        other: Any = site.call.args.get("other")
        if fact is None or operand is not other:
            return None
        if fact.dtype.is_floating_point or fact.dtype.is_complex or "alpha" in site.call.args:
            return None
        number = WITH_ITSELF[site.call.op]
        if number is None:
            return site.is_operand(operand)
        return site.is_number(number, dropped=operand)

    examples = [
        fires(lambda x: (x - x, x ^ x, x & x, x == x), "i64[4, 8]", dynamic=True),
        declines(lambda x: (x - x, x == x), "f32[4, 8]"),  # infinity less itself is NaN, which is unlike itself
    ]
