"""Which autocast regions a node of a torch-level graph is in."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from .positions import Positions

ENTER, EXIT = "_enter_autocast", "_exit_autocast"


class AutocastRegions:
    """The regions of one graph, read once; a region that a rewrite erases is forgotten."""

    def __init__(self, graph: Graph) -> None:
        bounds = [node for node in graph.nodes if is_bound(node)]
        self._bounds = Positions(bounds)
        self._open_behind: dict[Node, tuple[Node, ...]] = {}
        """For each begin and end of a region: the begins of the regions that are open after it, outermost first."""
        inside: tuple[Node, ...] = ()
        for bound in bounds:
            inside = (*inside, bound) if _begins(bound) else _without(inside, bound.args[0])
            self._open_behind[bound] = inside

    def around(self, node: Node) -> list[tuple[Any, ...]]:
        """The arguments of the regions around a node, from the outermost to the innermost."""
        bound = self._bounds.before(node)
        return [] if bound is None else [begin.args for begin in self._open_behind[bound]]

    def forget(self, node: Node) -> None:
        """Remove the region whose enter or exit node is about to be erased. The exit node, which refers to the enter
        node, is erased first."""
        begin: Any = node if _begins(node) else node.args[0]
        if begin in self._open_behind:
            last = node if node is not begin else None
            for bound in self._bounds if last is None else self._bounds.between(begin, last):
                self._open_behind[bound] = _without(self._open_behind[bound], begin)
        for bound in (begin, node):
            if self._open_behind.pop(bound, None) is not None:
                self._bounds.remove(bound)


def is_bound(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in (ENTER, EXIT)


def _begins(bound: Node) -> bool:
    return getattr(bound.target, "__name__", "") == ENTER


def _without(regions: tuple[Node, ...], begin: Any) -> tuple[Node, ...]:
    return tuple(r for r in regions if r is not begin)
