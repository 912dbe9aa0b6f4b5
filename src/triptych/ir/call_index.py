"""The calls of a graph by operation: which operations occur, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView

from torch.fx import Node

from .calls import Call


class CallIndex:
    """The calls among some nodes by operation. `Program` says which nodes change; they are read again on the next
    query, so a change costs no walk over the graph."""

    def __init__(self, nodes: Iterable[Node], call: Callable[[Node], Call | None]) -> None:
        self._call = call
        self._nodes: dict[str, dict[Node, None]] = {}
        self._op_of: dict[Node, str] = {}
        self._changed: dict[Node, None] = {}
        for node in nodes:
            self._enter(node)

    def changed(self, node: Node) -> None:
        """A node is new, calls something else than before, or is about to be erased."""
        self._changed[node] = None

    def ops(self) -> KeysView[str]:
        """The operations that are called."""
        self._read_changes()
        return self._nodes.keys()

    def calls_of(self, ops: Iterable[str]) -> list[Node]:
        """The calls of these operations, in graph order."""
        self._read_changes()
        return sorted(node for op in ops for node in self._nodes.get(op, ()))

    def _read_changes(self) -> None:
        for node in self._changed:
            self._leave(node)
            if not node._erased:
                self._enter(node)
        self._changed.clear()

    def _enter(self, node: Node) -> None:
        if (call := self._call(node)) is not None:
            self._nodes.setdefault(call.op, {})[node] = None
            self._op_of[node] = call.op

    def _leave(self, node: Node) -> None:
        if (op := self._op_of.pop(node, None)) is None:
            return
        nodes = self._nodes[op]
        del nodes[node]
        if not nodes:
            del self._nodes[op]
