"""The queries of the value analysis: is a tensor all true, zero, a causal mask; does every row keep a key; which range
are its elements in? Computed lazily, once per node. Every answer is proved for all sizes that the program admits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from ... import _private
from ..calls import Call
from ..facts import fact, known, known_equal, tensor_fact, tensor_of
from ..operations import with_trait
from ..program import ATEN, Program
from .affine import (
    NEVER,
    Affine,
    Condition,
    TooLarge,
    either,
    holds_everywhere,
    lower_triangle,
    opposite,
    row_keeps_one,
    same_condition,
)
from .arithmetic import COMPARISONS, by_range
from .elements import Elements, leaf_of, uniform
from .operands_first import answer_from_operands
from .ranges import Interval, has_range, interval, of_dtype, of_elements
from .shape_only import SAME_ELEMENTS, ShapeOnly, distinct, is_plain
from .transfer import FROM_NUMBERS, TRANSFER

NEVER_NEGATIVE, NEVER_NEGATIVE_ZERO = with_trait("never_negative"), with_trait("never_negative_zero")


def knowledge(program: Program) -> Knowledge:
    """The analysis of a program. It is stored with the program and stays valid, since rewrites do not change values."""
    if program.knowledge is None:
        program.knowledge = Knowledge(program)
    return program.knowledge


class Knowledge:
    """Answers queries about the values of one program; False or None where nothing is proved."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._shape_only = ShapeOnly(program)
        self._elements: dict[Node, Elements | None] = {}
        self._intervals: dict[Node, Interval] = {}

    # ---- queries ----

    def evaluate(self, node: Node) -> torch.Tensor | None:
        """The elements, on the CPU, of a small tensor that depends on static sizes alone."""
        return self._shape_only.value(node)

    def is_all_true(self, node: Node) -> bool:
        """A boolean that is true everywhere."""
        return self._proved(node, _booleans, lambda where, shape: holds_everywhere(where, shape), lambda v: v.all())

    def is_all_false(self, node: Node) -> bool:
        """A boolean that is false everywhere."""
        return self._proved(node, _booleans, lambda where, shape: where.never, lambda v: not v.any())

    def is_zero(self, node: Node) -> bool:
        """A float that is 0.0 or -0.0 everywhere."""
        return self._proved(node, _floats, _zero_everywhere, lambda v: (v == 0).all())

    def is_causal(self, node: Node) -> bool:
        """A boolean of shape (..., n, n) that is true exactly where the last index is at most the one before it."""
        if not _square(node):
            return False
        return self._proved(
            node, _booleans, lambda where, shape: same_condition(where, lower_triangle(shape), shape),
            lambda v: (v == _lower(v)).all(), matrices=True,
        )  # fmt: skip

    def is_causal_bias(self, node: Node, lowest: float = -math.inf) -> bool:
        """A float of shape (..., n, n) that is 0 where the last index is at most the one before it, else at most
        `lowest`."""

        def by_pattern(elements: Elements, shape: Any) -> bool:
            zero = _zero_or_at_most(elements, lowest, shape)
            return zero is not None and same_condition(zero, lower_triangle(shape), shape)

        def by_value(value: torch.Tensor) -> Any:
            return torch.where(_lower(value), value == 0, value <= lowest).all()

        return _square(node) and self._proved(node, _floats, by_pattern, by_value, matrices=True)

    def bias_keeps_one(self, node: Node, lowest: float) -> bool:
        """A float of shape (..., rows, keys) that is 0 or at most `lowest`, with at least one 0 in each row."""

        def by_pattern(elements: Elements, shape: Any) -> bool:
            zero = _zero_or_at_most(elements, lowest, shape)
            return zero is not None and row_keeps_one(zero, shape)

        def by_value(value: torch.Tensor) -> Any:
            return ((value == 0) | (value <= lowest)).all() and (value == 0).any(-1).all()

        return _has_keys(node) and self._proved(node, _floats, by_pattern, by_value, matrices=True)

    def every_row_keeps_one(self, node: Node, negated: bool = False) -> bool:
        """A boolean of shape (..., rows, keys) with at least one key true in each row, or false if `negated`."""

        def by_pattern(where: Condition, shape: Any) -> bool:
            return row_keeps_one(opposite(where, shape) if negated else where, shape)

        return _has_keys(node) and self._proved(
            node, _booleans, by_pattern, lambda v: (~v if negated else v).any(-1).all(), matrices=True
        )

    def uniform(self, node: Any) -> torch.Tensor | None:
        """The number that all elements are equal to, as a zero-dim tensor of the same dtype."""
        if (elements := self.elements(node)) is None:
            return None
        with _private.plain_torch():
            return elements.number(tensor_of(node).dtype)

    def number(self, value: Any) -> bool | int | float | None:
        """A Python number as it is; for a tensor, the number that all elements are equal to."""
        if isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, Node) or tensor_fact(value) is None:
            return None
        elements = self.uniform(value)
        if elements is None:
            elements = self.evaluate(value)
        with _private.plain_torch():
            if elements is None or not elements.numel():
                return None
            first = elements.flatten()[0]
            return first.item() if elements.dim() == 0 or bool((elements == first).all()) else None

    def sources(self, node: Any) -> Iterator[tuple[Node, Call | None]]:
        """The node and the values that its elements come from, through views, copies and casts. Each is given with its
        call, which is None where the value may be written."""
        while isinstance(node, Node) and tensor_fact(node) is not None:
            call = self.program.call(node)
            if call is not None and (call.mutates or self.program.aliasing.written(node)):
                call = None
            yield node, call
            if call is None or call.op not in SAME_ELEMENTS and call.op != "to":
                return
            node = call.args.get("self")

    def never_negative_zero(self, node: Any) -> bool:
        """No element can be -0.0, so that adding 0.0 changes nothing."""
        for source, call in self.sources(node):
            # a small negative number could be rounded to -0.0 on the way
            if not tensor_of(source).dtype.is_floating_point or self.interval(source).low > 0:
                return True
            value = self.uniform(source)
            if value is not None:
                number = as_number(value)
                return not (number == 0 and math.copysign(1, number) < 0)
            if call is None:
                return False
            if call.op in NEVER_NEGATIVE_ZERO or (call.op == "mul" and call.args["self"] is call.args["other"]):
                return True
        return False

    def never_negative(self, node: Any) -> bool:
        """Is every element at least 0, -0.0 included, or NaN?"""
        for source, call in self.sources(node):
            if call is None:
                return False
            if call.op in NEVER_NEGATIVE or self.interval(source).low >= 0:
                return True
            if call.op == "to" and not self._keeps_sign(call.args["self"], source):
                return False
        return False

    def _keeps_sign(self, node: Node, cast: Node) -> bool:
        """Does a cast keep the sign of every element? Integers wrap around, and infinity becomes a negative integer."""
        dtype = tensor_of(cast).dtype
        if dtype.is_floating_point:
            return True
        numbers, limits = self.interval(node), of_dtype(dtype)
        return not numbers.nan and numbers.within(limits.low, limits.high)

    def mask(self, node: Node) -> Condition | None:
        """Where a boolean is true, if that is known."""
        tensor, elements = tensor_fact(node), self.elements(node)
        if elements is None or tensor is None or tensor.dtype != torch.bool:
            return None
        with _private.plain_torch():
            return _unless_too_large(lambda: elements.truth(tensor.shape))

    def bounds(self, node: Node) -> tuple[Any, Any]:
        """A lower and an upper bound of all elements, perhaps symbolic."""
        tensor, elements = tensor_fact(node), self.elements(node)
        if elements is not None and tensor is not None and isinstance(leaf := elements.only, Affine):
            low, high = leaf.least(tensor.shape), leaf.most(tensor.shape)
            if low is not None and high is not None:
                return low, high
        about = self.interval(node)
        return about.low, about.high

    # ---- the analysis ----

    def elements(self, node: Any) -> Elements | None:
        """The elements as a function of their index, if they follow a pattern."""
        if not isinstance(node, Node):
            return None
        if node in self._elements:
            return self._elements[node]
        if tensor_fact(node) is None:
            return None
        with _private.plain_torch(), torch.no_grad():
            if not self._elements:
                self._look_at_graph()
            answer_from_operands(node, self._elements, self._operands_of_elements, self._elements_of)
        return self._elements[node]

    def _look_at_graph(self) -> None:
        """Analyse an ATen graph as a whole, because passes ask about all of its nodes. A value is known only if it
        follows from known ones, so the walk starts at the sources of known values and goes on where one is found."""
        program = self.program
        if program.dialect != ATEN or program.buffers is not None:
            return
        self._elements = dict.fromkeys(program.graph.nodes)
        work = [*program.calls_of(*FROM_NUMBERS, *COMPARISONS), *program.graph.find_nodes(op="get_attr")]
        if program.aliasing.any_write:
            work += filter(program.aliasing.written, self._elements)
        waiting = set(work)
        heapq.heapify(work)
        while work:
            node = heapq.heappop(work)
            elements = None
            if tensor_fact(node) is not None:
                elements = self._elements[node] = self._elements_of(node, self._operands_of_elements(node))
            if elements is not None or isinstance(fact(node), (list, tuple)):  # the pieces of a known tensor
                later = [user for user in node.users if user not in waiting and user.op != "output"]
                waiting.update(later)
                for user in later:
                    heapq.heappush(work, user)

    def interval(self, node: Node) -> Interval:
        """A static lower and upper bound of all elements."""
        if node not in self._intervals:
            with _private.plain_torch(), torch.no_grad():
                answer_from_operands(node, self._intervals, self._operands_of_interval, self._interval_of)
        return self._intervals[node]

    def _operands(self, node: Node, call: Call) -> list[Node]:
        """The values that the elements of a result may follow from."""
        if call.mutates:
            return [call.args["self"]] if self._writes_in_full(node, call) else []
        operands = [n for n in node.all_input_nodes if tensor_fact(n) is not None]
        if call.op == "getitem" and isinstance(call.args["self"], Node):
            operands += [n for n in call.args["self"].all_input_nodes if tensor_fact(n) is not None]
        writer = self._written_once(node) if self.program.aliasing.any_write else None
        if writer is not None:
            operands += [n for n in writer.all_input_nodes if n is not node and tensor_fact(n) is not None]
        return operands

    def _operands_of_elements(self, node: Node) -> list[Node]:
        call = self.program.call(node)
        return self._operands(node, call) if call is not None and (call.mutates or call.op in TRANSFER) else []

    def _operands_of_interval(self, node: Node) -> list[Node]:
        call = self.program.call(node)
        return self._operands(node, call) if call is not None and has_range(call, tensor_of(node)) else []

    def _elements_of(self, node: Node, operands: Sequence[Node]) -> Elements | None:
        call = self.program.call(node)
        if call is None:
            return self._given(node, tensor_of(node))
        if not call.mutates and call.op not in TRANSFER:
            return None
        known_operands = [n for n in operands if self._elements[n] is not None]
        if not known_operands and self._follows_from(operands, node, call):
            return None  # most nodes
        result = tensor_of(node)
        if not is_plain(result):
            return None
        if call.mutates or self.unsafe(node):
            return self._after_write(node, call, result)
        try:
            elements = TRANSFER[call.op](self, node, call, result)
        except TooLarge:
            elements = None
        return by_range(self, call, result) if elements is None and call.op in COMPARISONS else elements

    def _follows_from(self, operands: Sequence[Node], node: Node, call: Call) -> bool:
        """Is nothing known of the result where nothing is known of any operand?"""
        if not operands or call.op in COMPARISONS or call.op in FROM_NUMBERS:
            return False
        return not self.program.aliasing.written(node)

    def _interval_of(self, node: Node, operands: Sequence[Node]) -> Interval:
        call, result, elements = self.program.call(node), tensor_of(node), self.elements(node)
        if elements is not None:
            return of_elements(elements, result)
        if call is None or not has_range(call, result) or not is_plain(result) or self.unsafe(node):
            return of_dtype(result.dtype)
        return interval(self, node, call, result)

    def _given(self, node: Node, result: torch.Tensor) -> Elements | None:
        """What is known of an input or an attribute."""
        if node.op == "get_attr":
            return self._attribute(node, result) if is_plain(result) else None
        if node.op != "placeholder" or self.program.buffers is None:
            return None
        contents = self.program.buffers.contents(node, self.program.aliasing)
        return None if contents is None else contents.pattern

    def _attribute(self, node: Node, result: torch.Tensor) -> Elements | None:
        value = self.evaluate(node)
        return uniform(leaf_of(value, result.dim())) if value is not None and value.numel() == 1 else None

    def unsafe(self, node: Node) -> bool:
        """Is the value written in place later, or the result of an impure operation? Then nothing is known of it."""
        aliasing = self.program.aliasing
        if not aliasing.effects(node).pure or aliasing.written(node) and aliasing.is_input(node):
            return True
        return any(not writer < node for writer in aliasing.writers(node))

    # ---- `mask.masked_fill_(...)`: a fresh tensor that is written once, before anything reads it ----

    def _written_once(self, node: Node) -> Node | None:
        """The only in-place write to a fresh tensor, if all its other users come after that write."""
        aliasing = self.program.aliasing
        if not aliasing.written(node) or not aliasing.is_fresh(node) or aliasing.is_input(node):
            return None
        (writer, *others) = aliasing.writers(node)
        call = self.program.call(writer)
        if others or call is None or call.args.get("self") is not node or not self._writes_in_full(writer, call):
            return None
        return writer if all(user is writer or writer < user for user in node.users) else None

    def _writes_in_full(self, node: Node, call: Call) -> bool:
        """Does the in-place operation leave in its target exactly what the out-of-place one would return?"""
        target = tensor_fact(call.args.get("self"))
        result = tensor_fact(node)
        if target is None or result is None or not call.op.endswith("_") or call.op[:-1] not in TRANSFER:
            return False
        return result.dtype == target.dtype and known_equal(result.shape, target.shape)

    def _after_write(self, node: Node, call: Call, result: torch.Tensor) -> Elements | None:
        if call.mutates:
            target = call.args.get("self")
            if not isinstance(target, Node) or self._written_once(target) is not node:
                return None
            return self._elements.get(target)
        writer = self._written_once(node)
        writes = self.program.call(writer) if writer is not None else None
        if writer is None or writes is None or call.op not in TRANSFER:
            return None
        try:
            self._elements[node] = TRANSFER[call.op](self, node, call, result)  # as it is before the write
            op = writes.op[:-1]
            return TRANSFER[op](self, writer, Call(op, writes.args), result)
        except TooLarge:
            return None

    def _proved(
        self,
        node: Node,
        dtype: Callable[[torch.dtype], bool],
        by_pattern: Callable[[Any, Any], bool],
        by_value: Callable[[torch.Tensor], Any],
        matrices: bool = False,
    ) -> bool:
        """Is a property proved by the pattern of the elements, or else by the evaluated elements?"""
        tensor = tensor_fact(node)
        if tensor is None or not dtype(tensor.dtype):
            return False
        elements = self.elements(node)
        if elements is None and self.evaluate(node) is None:
            return False  # most often
        about = self.mask(node) if dtype is _booleans else elements
        with _private.plain_torch():
            if about is not None and _unless_too_large(lambda: by_pattern(about, tensor.shape)):
                return True
            if elements is not None and elements.is_uniform and elements.number(tensor.dtype) is not None:
                return False
            value = self.evaluate(node)
            return value is not None and bool(by_value(distinct(value, keep=2 if matrices else 0)))


def as_number(value: torch.Tensor) -> bool | int | float:
    """The Python number of a real tensor of one element; works inside a compile, too."""
    with _private.plain_torch():
        return value.item()


def _unless_too_large(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except TooLarge:
        return None


def _booleans(dtype: torch.dtype) -> bool:
    return dtype == torch.bool


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _zero_everywhere(elements: Elements, shape: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) and leaf.item() == 0 for _, leaf in elements.pieces)


def _zero_or_at_most(elements: Elements, lowest: float, shape: Any) -> Condition | None:
    """Where a float is 0, if it is at most `lowest` elsewhere."""
    zero = NEVER
    for where, leaf in elements.pieces:
        number = leaf.item() if isinstance(leaf, torch.Tensor) else math.nan
        if number != 0 and not number <= lowest:
            return None
        zero = either(zero, where, shape) if number == 0 else zero
    return zero


def _square(node: Node) -> bool:
    tensor = tensor_fact(node)
    return tensor is not None and tensor.dim() >= 2 and known_equal(tensor.shape[-1], tensor.shape[-2])


def _has_keys(node: Node) -> bool:
    tensor = tensor_fact(node)
    return tensor is not None and tensor.dim() > 0 and known(tensor.shape[-1] > 0)


def _lower(value: torch.Tensor) -> torch.Tensor:
    return torch.ones(value.shape[-2:], dtype=torch.bool).tril()
