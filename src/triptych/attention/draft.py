"""Expressions over values of a graph that are not in the graph yet.

A plan needs the sum of two biases, the negation of a mask, the keys with their axes in another order; and it needs to
know the shape and the dtype of each of them, and what their elements are. `Draft` has the interface of an emitter:
`draft.add(x, y)` is an expression. Expressions are nodes of a small graph apart from the program's, the `Sheet`, in
which stand-ins represent values of the program. The program's graph, and the users of its nodes, stay as they are until
`place` copies expressions into it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from ..ir.alias import Aliasing
from ..ir.calls import Call
from ..ir.effects import Effects, effects
from ..ir.fact_memo import FactMemo
from ..ir.facts import fact, known_equal, tensor_of
from ..ir.gradients import may_require_grad
from ..ir.program import Program, Value
from ..ir.values import Knowledge, knowledge
from ..ir.values.elements import Elements
from ..ir.values.ranges import Interval
from ..ir.values.shape_only import ShapeOnly
from ..rewrite.emit import Emitter
from .rule import is_decomposed
from .sharing import Shared

SAME_ELEMENTS = ("reshape", "squeeze", "unsqueeze", "expand", "clone")
"""Operations whose result has the elements of its operand in their order; `expand` where the shape stays."""


class Draft(Shared):
    """Builds expressions that could be inserted before `anchor`, a node of the program. An expression that an earlier
    draft on the same sheet has built is reused."""

    program: Sheet

    def __init__(self, sheet: Sheet, anchor: Node) -> None:
        sheet.anchor = anchor
        regions = tuple(map(tuple, sheet.origin.autocast_around(anchor)))
        super().__init__(sheet, sheet.end, "draft", sheet.expressions.setdefault(regions, {}))

    def of(self, value: Node | Value) -> Value:
        """A value of the program, or an expression, as an expression."""
        return Value(self.program, self._plain(value))

    def reshape(self, value: Value, shape: Sequence[Any]) -> Value:
        """After autograd the operands of every product have been reshaped, and copied where a view is not possible. If
        a value is reshaped back to an earlier shape, the earlier value is used."""
        if is_decomposed(self.program):
            value = self.of(value)
            if (source := self._before_reshape(value.node, shape)) is not None:
                return self.of(source)
            call = self.program.call(value.node)
            swap = [*range(value.rank - 2), value.rank - 1, value.rank - 2]
            if call is not None and call.op == "permute" and list(call.args["dims"]) == swap:
                was = [*shape[:-2], shape[-1], shape[-2]]
                if (source := self._before_reshape(call.args["self"], was)) is not None:
                    return self.permute(self.of(source), [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
        return self.__getattr__("reshape")(value, shape)

    def _before_reshape(self, node: Node, shape: Sequence[Any]) -> Node | None:
        """The earliest value with this shape among those that a node is a reshape of."""
        above = reshaped_from(self.program, node)
        return next((n for n in reversed(list(above)) if known_equal(tensor_of(n).shape, shape)), None)

    def permute(self, value: Value, dims: Sequence[int]) -> Value:
        """After autograd the keys have been transposed for their product: a permute of a permute is merged into one."""
        value = self.of(value)
        call = self.program.call(value.node)
        if is_decomposed(self.program) and call is not None and call.op == "permute":
            dims = [call.args["dims"][d] for d in dims]
            value = self.of(call.args["self"])
            if list(dims) == sorted(dims):
                return value
        return self.__getattr__("permute")(value, dims)

    def wants_gradient(self, value: Value) -> bool:
        """May the expression require a gradient?"""
        return any(may_require_grad(leaf) for leaf in self.program.leaves([self.of(value)]))

    def place(self, op: Emitter, values: Sequence[Value | None]) -> list[Value | None]:
        """Insert expressions into the program's graph; returns the values of that graph in the same order."""
        sheet = self.program
        drafted = [None if v is None else self.of(v) for v in values]
        placed: dict[Node, Any] = {}

        def in_graph(node: Node) -> Any:
            if node not in placed:
                original = sheet.original(node)
                placed[node] = op.size_node(original) if isinstance(original, torch.SymInt) else original
            return placed[node]

        for node in sheet.under([v for v in drafted if v is not None]):
            if sheet.original(node) is None:
                args, kwargs = map_arg((node.args, node.kwargs), in_graph)
                placed[node] = op.node(node.op, node.target, args, kwargs).node
        return [None if v is None else Value(op.program, in_graph(v.node)) for v in drafted]

    def size_node(self, size: torch.SymInt) -> Any:
        return int(size) if size.node.is_constant() else self._stand_in(size, size.node.expr)

    def _plain(self, value: Any) -> Any:
        value = super()._plain(value)
        is_real = isinstance(value, Node) and value.graph is not self.program.graph
        return self._stand_in(value, value) if is_real else value

    def _stand_in(self, original: Node | torch.SymInt, key: Any) -> Node:
        """The node of the sheet that represents a node or a size of the program."""
        sheet = self.program
        node = sheet.stand_ins.get(key)
        if node is None or isinstance(original, Node) and fact(node) is not fact(original):  # e.g. other strides
            name = f"stand_in_{len(sheet.originals)}"
            sheet.originals[name] = original
            node = sheet.stand_ins[key] = self.node("placeholder", name, (), {}).node
        return node


def reshaped_from(program: Program, node: Node) -> Iterator[Node]:
    """The values above a node that have the same elements in the same order, reshaped or not, copied or not.

    Values that are written in place are left out: a copy would not show the write.
    """
    written = program.aliasing.written
    while (call := program.call(node)) is not None and call.op in SAME_ELEMENTS and not call.mutates:
        source = call.args["self"]
        if call.op == "expand" and not known_equal(tensor_of(source).shape, tensor_of(node).shape):
            return
        if written(source) or written(node):
            return
        yield source
        node = source


class Sheet(Program):
    """The expressions of some drafts: a separate graph with the options, dialect and fake mode of the program."""

    def __init__(self, origin: Program) -> None:
        """Unlike for a captured graph, no facts are computed here: they come from the program."""
        self.origin, self.graph = origin, Graph()
        self.end = self.graph.output(())
        self.anchor = self.end
        """The node of the program before which expressions would be inserted."""
        self.expressions: dict[Any, dict[Any, Node]] = {}
        """For each autocast state, the expressions by operation and operands."""
        self.gm, self.options, self.is_inference = origin.gm, origin.options, origin.is_inference
        self.dialect, self.fact_key, self.fake_mode = origin.dialect, origin.fact_key, origin.fake_mode
        self.originals: dict[str, Node | torch.SymInt] = {}
        """What stand-ins represent, by their names: nodes of the program, or sizes that some node of it computes."""
        self.stand_ins: dict[Any, Node] = {}
        self.notes = {}
        self._calls = {}
        self._sizes = None
        self._aliasing = _SheetAliasing(self)
        self.knowledge = _SheetKnowledge(self)

    def original(self, node: Node) -> Node | torch.SymInt | None:
        """What a stand-in represents; None for an expression."""
        return self.originals[str(node.target)] if node.op == "placeholder" else None

    def real(self, node: Node) -> Node | None:
        """The program's node, given that node or its stand-in; None for an expression, and for a size."""
        value = node if node.graph is not self.graph else self.original(node)
        return value if isinstance(value, Node) else None

    def under(self, values: Sequence[Value]) -> list[Node]:
        """All nodes of the sheet that some expressions are computed from, and their own nodes, operands first."""
        work = [v.node for v in values]
        seen = set(work)
        while work:
            for node in work.pop().all_input_nodes:
                if node not in seen:
                    seen.add(node)
                    work.append(node)
        return sorted(seen)

    def leaves(self, values: Sequence[Value]) -> list[Node]:
        """The nodes of the program that some expressions are computed from."""
        return [real for node in self.under(values) if (real := self.real(node)) is not None]

    # ---- facts: those of stand-ins come from the program ----

    def call(self, node: Node) -> Call | None:
        real = self.real(node)
        return super().call(node) if real is None else self.origin.call(real)

    def compute(self, node: Node, known: Callable[[Node], Any] = fact, at: Node | None = None) -> Any:
        original = self.original(node)
        if original is None:
            return super().compute(node, known, at)
        return fact(original) if isinstance(original, Node) else original

    def autocast_around(self, node: Node) -> list[tuple[Any, ...]]:
        return self.origin.autocast_around(self.anchor)

    @functools.cached_property
    def fact_memo(self) -> FactMemo:
        return self.origin.fact_memo

    @functools.cached_property
    def is_training(self) -> bool:
        return self.origin.is_training

    @functools.cached_property
    def has_symbols(self) -> bool:
        return self.origin.has_symbols

    @functools.cached_property
    def has_composites(self) -> bool:
        return self.origin.has_composites


class _SheetAliasing(Aliasing):
    """Expressions write nothing; views among them share the memory of their bases."""

    def __init__(self, sheet: Sheet) -> None:
        super().__init__(sheet.graph, sheet.call)
        self.sheet, self.origin = sheet, sheet.origin

    def add(self, node: Node) -> None:
        """Effects are read from a node when they are first asked for."""

    def effects(self, node: Node) -> Effects:
        if (real := self.sheet.real(node)) is not None:
            return self.origin.aliasing.effects(real)
        if node not in self._effects:
            self._effects[node] = effects(node, self._call)
        return self._effects[node]

    def written(self, node: Node) -> bool:
        return any(self.origin.aliasing.written(n) for n in self.shared(node))

    def is_fresh(self, node: Node) -> bool:
        real = self.sheet.real(node)
        return real is not None and self.origin.aliasing.is_fresh(real)

    def shared(self, node: Node) -> list[Node]:
        """The nodes of the program whose memory a value shares."""
        if (real := self.sheet.real(node)) is not None:
            return [real]
        seen = self.effects(node)
        views = [a for a in seen.aliases if not (seen.may_copy and self.surely_apart(node, a))]
        return [n for view in views for n in self.shared(view)]


class _SheetKnowledge(Knowledge):
    """What is known of the elements of expressions."""

    program: Sheet

    def __init__(self, sheet: Sheet) -> None:
        super().__init__(sheet)
        self.origin = sheet.origin
        self._shape_only = _SheetShapeOnly(sheet)

    def evaluate(self, node: Node) -> torch.Tensor | None:
        real = self.program.real(node)
        return super().evaluate(node) if real is None else knowledge(self.origin).evaluate(real)

    def elements(self, node: Any) -> Elements | None:
        real = self.program.real(node) if isinstance(node, Node) else None
        return super().elements(node) if real is None else knowledge(self.origin).elements(real)

    def interval(self, node: Node) -> Interval:
        real = self.program.real(node)
        return super().interval(node) if real is None else knowledge(self.origin).interval(real)

    def unsafe(self, node: Node) -> bool:
        aliasing, anchor = self.origin.aliasing, self.program.anchor
        return any(
            aliasing.written(n) and aliasing.is_input(n) or any(not writer < anchor for writer in aliasing.writers(n))
            for n in self.program.aliasing.shared(node)  # type: ignore[attr-defined]
        )

    def _look_at_graph(self) -> None:
        """Expressions are added one by one, and each is analysed when it is asked about."""

    def _operands(self, node: Node, call: Call) -> list[Node]:
        return [] if self.program.real(node) is not None else super()._operands(node, call)

    def _elements_of(self, node: Node, operands: Sequence[Node]) -> Elements | None:
        real = self.program.real(node)
        return super()._elements_of(node, operands) if real is None else knowledge(self.origin).elements(real)

    def _interval_of(self, node: Node, operands: Sequence[Node]) -> Interval:
        real = self.program.real(node)
        return super()._interval_of(node, operands) if real is None else knowledge(self.origin).interval(real)


class _SheetShapeOnly(ShapeOnly):
    program: Sheet

    def _constant(self, node: Node) -> Any:
        real = self.program.real(node)
        value = None if real is None else knowledge(self.program.origin).evaluate(real)
        return super()._constant(node) if value is None else value
