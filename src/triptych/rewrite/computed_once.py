"""Taking work on weights out of a graph: what is computed once goes into a graph of its own, whose results come in."""

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
"""Where the module of a graph has what was taken out of it, until the flow takes it over."""


class ComputedOnce:
    """What was taken out of a graph: operations, the inputs they take, and the inputs that stand for their results."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.inputs = gm.graph.find_nodes(op="placeholder")
        """What the graph took before."""
        self.sources: list[Node] = []
        """Those of its inputs that the operations here take."""
        self.results: dict[Node, Node] = {}
        """Each new input of the graph, and the operation here that makes it."""
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}

    def take(self, node: Node) -> None:
        """Copy a value and everything that it is computed from; what was taken before is shared."""
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
        """Which of its inputs the graph still takes, by their old place."""
        return [place for place, node in enumerate(self.inputs) if not node._erased]

    @property
    def weights(self) -> list[int]:
        """Which inputs the operations taken out need, by their old place."""
        return [self.inputs.index(node) for node in self.sources]

    def module(self) -> GraphModule:
        """From the weights to the constants."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[result] for result in self.results.values()))
        return GraphModule(self.gm, graph, "Constants")


@dataclass(frozen=True)
class TakeOut(SoundByRule):
    """A value is computed before the graph is called: it becomes an input. That it is the same on every call is for the
    rule to know."""

    node: Node
    mark: str
    """What the new input is marked with."""

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        gm = rewriter.program.gm
        taken: ComputedOnce = gm.meta.setdefault(COMPUTED_ONCE, ComputedOnce(gm))
        taken.take(self.node)
        behind = ancestors([self.node])
        constant = rewriter.add_input(f"constant_{self.node.name}", tensor_fact(self.node))
        constant.meta[self.mark] = True
        taken.stands_for(constant, self.node)
        rewriter.read_instead(self.node, constant, list(self.node.users))
        rewriter.erase_unused(behind)


@dataclass(frozen=True)
class DropInputs(SoundByRule):
    """Inputs that nobody reads any more are no inputs any more; the flow knows which are left."""

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
