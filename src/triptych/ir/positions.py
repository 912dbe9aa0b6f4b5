"""A few nodes of a graph in graph order, so that the nodes between two positions are found without a walk."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from torch.fx import Node


class Positions:
    """Nodes sorted by graph position. A node must be removed before it is moved, and added again afterwards."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes = sorted(nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return self._index(node) is not None

    def add(self, node: Node) -> None:
        if node not in self:
            bisect.insort(self._nodes, node)

    def remove(self, node: Node) -> None:
        """Must be called before the node leaves the graph: without a position it cannot be looked up."""
        index = self._index(node)
        if index is not None:
            del self._nodes[index]

    def update(self, others: Positions) -> None:
        self._nodes = sorted({*self._nodes, *others._nodes})

    def between(self, first: Node, last: Node) -> Iterator[Node]:
        """The nodes from `first` up to but excluding `last`."""
        for index in range(bisect.bisect_left(self._nodes, first), len(self._nodes)):
            if not self._nodes[index] < last:
                return
            yield self._nodes[index]

    def before(self, node: Node) -> Node | None:
        """The nearest of these nodes before `node`."""
        index = bisect.bisect_left(self._nodes, node)
        return self._nodes[index - 1] if index else None

    def _index(self, node: Node) -> int | None:
        index = bisect.bisect_left(self._nodes, node)
        return index if index < len(self._nodes) and self._nodes[index] is node else None
