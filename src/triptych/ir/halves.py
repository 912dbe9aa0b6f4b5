"""The two halves of a joint graph, before the partitioner cuts it apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from .effects import effects
from .facts import is_tangent


def computed_from_gradients(nodes: Sequence[Node]) -> set[Node]:
    """The nodes that depend on a gradient that comes into the graph, in a list in the order of the graph."""
    late: set[Node] = set()
    for node in nodes:
        if is_tangent(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


@dataclass(frozen=True)
class Halves:
    """Which nodes certainly belong to the backward; all others may be needed by a result of the forward."""

    late: frozenset[Node]
    """The nodes computed from incoming gradients."""
    spare: frozenset[Node]
    """Nodes that are not computed from incoming gradients, but that only the backward reads. The partitioner decides
    whether the forward saves them."""

    @staticmethod
    def of(graph: Graph) -> Halves:
        *nodes, output = graph.nodes
        late = computed_from_gradients(nodes)
        spare: set[Node] = set()
        for node in reversed(nodes):
            only_computes = node.op == "call_function" and node not in late and effects(node).pure
            if only_computes and all(u is not output and (u in late or u in spare) for u in node.users):
                spare.add(node)
        return Halves(frozenset(late), frozenset(spare))

    def is_backward(self, node: Node) -> bool:
        return node in self.late or node in self.spare
