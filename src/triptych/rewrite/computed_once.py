"""Hoisting work on weights out of a graph: operations that are computed once move into a separate graph, whose results
become inputs of the original one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Graph, GraphModule, Node

from ..ir.facts import tensor_fact
from .edits import SoundByRule

if TYPE_CHECKING:
    from .emit import Emitter
    from .rewriter import Rewriter

COMPUTED_ONCE = "triptych_computed_once"
"""Meta key of a graph module: the operations hoisted out of its graph, until the compile flow collects them."""


class ComputedOnce:
    """The operations hoisted out of a graph, the inputs that they read, and the new inputs that hold their results."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.inputs = gm.graph.find_nodes(op="placeholder")
        """The inputs of the graph before anything was hoisted."""
        self.sources: list[Node] = []
        """The inputs that the hoisted operations read."""
        self.results: dict[Node, Node] = {}
        """Each new input of the graph, and the hoisted operation that computes it."""
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}

    def take(self, node: Node) -> None:
        """Copy a value and everything that it is computed from; nodes that were copied before are shared."""
        for one in sorted(ancestors([node])):
            if one in self._copies:
                continue
            if one.op == "placeholder":
                self.sources.append(one)
            first = next((n for n in self._graph.nodes if n.op != "placeholder"), None)
            place = self._graph._root if first is None or one.op != "placeholder" else first
            with self._graph.inserting_before(place):
                self._copies[one] = self._graph.node_copy(one, self._copies.__getitem__)

    def stands_for(self, constant: Node, node: Node) -> None:
        """The new input `constant` has the value of `node`."""
        self.results[constant] = self._copies[constant] = self._copies[node]

    @property
    def operations(self) -> int:
        return sum(n.op == "call_function" for n in self._graph.nodes)

    @property
    def constants(self) -> list[Node]:
        """The new inputs of the graph, in order."""
        return list(self.results)

    @property
    def kept(self) -> list[int]:
        """The old indices of the inputs that the graph still has."""
        return [place for place, node in enumerate(self.inputs) if not node._erased]

    @property
    def weights(self) -> list[int]:
        """The old indices of the inputs that the hoisted operations read."""
        return [self.inputs.index(node) for node in self.sources]

    def module(self) -> GraphModule:
        """A module that computes the constants from the weights."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[result] for result in self.results.values()))
        return GraphModule(self.gm, graph, "Constants")


@dataclass(frozen=True)
class TakeOut(SoundByRule):
    """Compute a value before the graph is called: it becomes an input. The rule must ensure that it is the same on
    every call."""

    node: Node
    mark: str
    """Meta key that is set on the new input."""

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        gm = rewriter.program.gm
        computed_once: ComputedOnce = gm.meta.setdefault(COMPUTED_ONCE, ComputedOnce(gm))
        computed_once.take(self.node)
        behind = ancestors([self.node])
        constant = rewriter.add_input(f"constant_{self.node.name}", tensor_fact(self.node))
        constant.meta[self.mark] = True
        computed_once.stands_for(constant, self.node)
        rewriter.read_instead(self.node, constant, list(self.node.users))
        rewriter.erase_unused(behind)


@dataclass(frozen=True)
class DropInputs(SoundByRule):
    """Remove inputs that no node reads any more; the compile flow learns from `ComputedOnce.kept` which are left."""

    nodes: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        for node in self.nodes:
            rewriter.erase(node)


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Some values, and everything that they are computed from."""
    seen: set[Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            work.extend(node.all_input_nodes)
    return seen
