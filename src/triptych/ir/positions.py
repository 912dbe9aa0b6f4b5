"""A few nodes of a graph in graph order, so that what stands between two places is found without a walk."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from torch.fx import Node


class Positions:
    """Nodes sorted by where they stand. A node that is moved must be removed before and added after."""

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
        """Before it leaves the graph: a node without a place cannot be looked up."""
        index = self._index(node)
        if index is not None:
            del self._nodes[index]

    def update(self, others: Positions) -> None:
        self._nodes = sorted({*self._nodes, *others._nodes})

    def between(self, first: Node, last: Node) -> Iterator[Node]:
        """Those from `first` on, up to and without `last`."""
        for index in range(bisect.bisect_left(self._nodes, first), len(self._nodes)):
            if not self._nodes[index] < last:
                return
            yield self._nodes[index]

    def before(self, node: Node) -> Node | None:
        """The nearest one before a node."""
        index = bisect.bisect_left(self._nodes, node)
        return self._nodes[index - 1] if index else None

    def _index(self, node: Node) -> int | None:
        index = bisect.bisect_left(self._nodes, node)
        return index if index < len(self._nodes) and self._nodes[index] is node else None
