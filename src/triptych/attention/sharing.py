"""Nodes that several attentions of one graph need, such as a prepared mask, are created once."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..ir.program import Program, Value
from ..ir.schema import argument_key
from ..rewrite.emit import Emitter


class Shared(Emitter):
    """An emitter that reuses a node of an earlier attention where it would create the same one again."""

    def __init__(self, program: Program, anchor: Node, rule: str, earlier: dict[Any, Node]) -> None:
        super().__init__(program, anchor, rule)
        self.earlier = earlier
        """The created nodes by kind, target and arguments; those that were discarded are marked as erased."""

    def node(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None
    ) -> Value:
        key = (kind, target, argument_key(args), argument_key(kwargs))
        same = self.earlier.get(key)
        if same is not None and self._usable(same):
            return Value(self.program, same)
        created = super().node(kind, target, args, kwargs, value)
        self.earlier[key] = created.node
        return created

    def _usable(self, node: Node) -> bool:
        aliasing = self.program.aliasing
        if node._erased or not node < self.anchor or not aliasing.effects(node).pure:
            return False
        return not aliasing.written(node) and aliasing.barrier_between(node, self.anchor) is None
