"""Which values belong to the model: parameters, buffers, and values computed from them alone."""

from __future__ import annotations

from torch.fx import Graph, Node

from .alias import Aliasing

STATIC_INPUT = "_dynamo_static_input_type"
"""Dynamo's mark on an input that is a parameter or a buffer of a module."""

FIXED = "triptych_fixed"
"""Our meta key for an input that is in the same memory on every call."""


def is_weight(node: Node) -> bool:
    """A parameter or a buffer, as an attribute of the graph's module or as an input that Dynamo, or `freeze`, marks."""
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and (STATIC_INPUT in node.meta.get("tensor_dict", ()) or FIXED in node.meta)


class Weights:
    """Values that are computed from weights and constants alone, and so are the same until a weight changes."""

    def __init__(self, graph: Graph, aliasing: Aliasing) -> None:
        self.aliasing = aliasing
        self._known: dict[Node, bool] = {}
        for node in graph.nodes:
            self._known[node] = self._derived(node)

    def derive(self, node: Node) -> bool:
        """Is the value computed from weights alone? Rewrites do not change values, so an answer stays valid."""
        if node not in self._known:
            self._known[node] = self._derived(node)
        return self._known[node]

    def _derived(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return is_weight(node) and not self.aliasing.written(node)
        if node.op not in ("call_function", "call_method") or not self.aliasing.effects(node).pure:
            return False
        return all(self.derive(n) for n in node.all_input_nodes) and not self.aliasing.written(node)
