"""Expressions over values of a graph that are not in the graph yet.

A plan needs the sum of two biases, the negation of a mask, the keys with their axes in another order; and it needs to
know the shape and the dtype of each of them, and what their elements are. `Draft` has the interface of an emitter:
`draft.add(x, y)` is an expression. Expressions are nodes of a small graph apart from the program's, the `Sheet`, in
which stand-ins represent values of the program. The program's graph, and the users of its nodes, stay as they are until
`place` copies expressions into it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from ..ir.alias import Aliasing
from ..ir.calls import Call
from ..ir.effects import Effects, effects
from ..ir.facts import fact, set_fact, tensor_fact
from ..ir.gradients import may_require_grad
from ..ir.program import Program, Value
from ..ir.values import Knowledge, knowledge
from ..ir.values.elements import Elements
from ..ir.values.ranges import Interval
from ..ir.values.shape_only import ShapeOnly
from .sharing import Shared


class Draft(Shared):
    """Makes expressions that could stand before `anchor`, a node of the program. An expression that an earlier draft on
    the same sheet has made is not made again."""

    program: Sheet

    def __init__(self, sheet: Sheet, anchor: Node) -> None:
        sheet.anchor = anchor
        regions = tuple(map(tuple, sheet.origin.autocast_regions.around(anchor)))
        super().__init__(sheet, sheet.end, "draft", sheet.expressions.setdefault(regions, {}))

    def of(self, value: Node | Value) -> Value:
        """A value of the program, or an expression, as an expression."""
        return Value(self.program, self._plain(value))

    def wants_gradient(self, value: Value) -> bool:
        """May autograd follow the expression?"""
        return any(may_require_grad(leaf) for leaf in self.program.leaves([self.of(value)]))

    def place(self, op: Shared, values: Sequence[Value | None]) -> list[Value | None]:
        """Write expressions into the graph; the values they are there, in the same order."""
        placed: dict[Node, Any] = {}
        drafted = [None if v is None else self.of(v) for v in values]

        def in_graph(node: Node) -> Any:
            if node not in placed:
                real = self.program.stands_for[node]
                placed[node] = op.size_node(real) if isinstance(real, torch.SymInt) else real
            return placed[node]

        for node in self.program.under([v for v in drafted if v is not None]):
            if node in self.program.stands_for:
                continue
            args, kwargs = map_arg((node.args, node.kwargs), in_graph)
            operands = [n for n in node.all_input_nodes if n in placed]
            # two nodes must not have one fact: it would say that they share memory
            if node in self.program.placed or any(tensor_fact(n) is not tensor_fact(placed[n]) for n in operands):
                placed[node] = op.node(node.op, node.target, args, kwargs).node
            else:
                placed[node] = op.copied(node, args, kwargs).node
            self.program.placed.add(node)
        return [None if v is None else Value(op.program, in_graph(v.node)) for v in drafted]

    def size_node(self, size: torch.SymInt) -> Any:
        return int(size) if size.node.is_constant() else self.program.stand_in(size)

    def _plain(self, value: Any) -> Any:
        value = super()._plain(value)
        return self.program.stand_in(value) if isinstance(value, Node) else value


class Sheet(Program):
    """The expressions of some drafts: a graph beside the program's, with the same options and the same surroundings."""

    def __init__(self, origin: Program) -> None:
        """Nothing is computed here, as it is for a graph that was captured: what is known comes from the program."""
        self.origin, self.graph = origin, Graph()
        self.end = self.graph.output(())
        self.anchor = self.end
        """The node of the program before which expressions would stand."""
        self.expressions: dict[Any, dict[Any, Node]] = {}
        """By operation and operands, for each autocast state."""
        self.gm, self.options, self.is_inference = origin.gm, origin.options, origin.is_inference
        self.dialect, self.fact_key, self.fake_mode = origin.dialect, origin.fact_key, origin.fake_mode
        self.stands_for: dict[Node, Node | torch.SymInt] = {}
        """What each stand-in represents: a node of the program, or a size that some node of it computes."""
        self.placed: set[Node] = set()
        """Expressions whose facts nodes of the program have now."""
        self.notes = {}
        self._stand_ins: dict[Any, Node] = {}
        self._calls = {}
        self._sizes = None
        self._aliasing = _SheetAliasing(self)
        self.knowledge = _SheetKnowledge(self)

    def stand_in(self, value: Node | torch.SymInt) -> Node:
        """What represents a node or a size of the program; a node of the sheet is itself."""
        if isinstance(value, Node) and value.graph is self.graph:
            return value
        key, known = (value, fact(value)) if isinstance(value, Node) else (value.node.expr, value)
        node = self._stand_ins.get(key)
        if node is None or key is value and fact(node) is not known:  # its strides may have changed since
            with self.graph.inserting_before(self.end):
                node = self.graph.placeholder("stand_in")
            set_fact(node, known, self.fact_key)
            self._stand_ins[key], self.stands_for[node] = node, value
        return node

    def real(self, node: Node) -> Node | None:
        """The node of the program that a stand-in represents; None for an expression, and for a size."""
        value = node if node.graph is not self.graph else self.stands_for.get(node)
        return value if isinstance(value, Node) else None

    def under(self, values: Sequence[Value]) -> list[Node]:
        """All nodes of the sheet that go into some expressions, and they themselves, operands first."""
        work = [v.node for v in values]
        seen = set(work)
        while work:
            for node in work.pop().all_input_nodes:
                if node not in seen:
                    seen.add(node)
                    work.append(node)
        return sorted(seen)

    def leaves(self, values: Sequence[Value]) -> list[Node]:
        """The nodes of the program that go into some expressions."""
        return [real for node in self.under(values) if (real := self.real(node)) is not None]

    # ---- what is known: of stand-ins what the program knows ----

    def call(self, node: Node) -> Call | None:
        real = self.real(node)
        return super().call(node) if real is None else self.origin.call(real)

    @contextlib.contextmanager
    def computing(self, node: Node) -> Iterator[None]:
        with self.origin.computing(self.anchor):
            yield

    def autocast_dtype(self, node: Node, device: torch.device) -> torch.dtype | None:
        return self.origin.autocast_dtype(self.anchor, device)

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
    """Expressions write nothing; views among them share the memory of what they are views of."""

    def __init__(self, sheet: Sheet) -> None:
        super().__init__(sheet.graph)
        self.sheet, self.origin = sheet, sheet.origin

    def add(self, node: Node) -> None:
        """Effects are read from a node when they are first asked for."""

    def effects(self, node: Node) -> Effects:
        if (real := self.sheet.real(node)) is not None:
            return self.origin.aliasing.effects(real)
        if node not in self._effects:
            self._effects[node] = effects(node)
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

    def _operands(self, node: Node) -> list[Node]:
        return [] if self.program.real(node) is not None else super()._operands(node)

    def _note(self, node: Node) -> None:
        if (real := self.program.real(node)) is None:
            return super()._note(node)
        self._elements[node] = knowledge(self.origin).elements(real)
        self._intervals[node] = knowledge(self.origin).interval(real)
        return None


class _SheetShapeOnly(ShapeOnly):
    program: Sheet

    def _constant(self, node: Node) -> Any:
        real = self.program.real(node)
        value = None if real is None else knowledge(self.program.origin).evaluate(real)
        return super()._constant(node) if value is None else value
