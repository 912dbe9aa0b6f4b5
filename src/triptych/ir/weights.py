"""Which values are the model's own: parameters, buffers, and what is computed from them alone."""

from __future__ import annotations

from torch.fx import Graph, Node

from .alias import Aliasing

STATIC_INPUT = "_dynamo_static_input_type"
"""Dynamo's mark on an input that is a parameter or a buffer of a module."""

FIXED = "triptych_fixed"
"""Our mark on an input that lies in the same memory on every call."""


def is_weight(node: Node) -> bool:
    """A parameter or a buffer, as an attribute of the graph's module or as an input that Dynamo, or `freeze`, marks."""
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and (STATIC_INPUT in node.meta.get("tensor_dict", ()) or FIXED in node.meta)


class Weights:
    """What is computed from weights and constants alone, and so is the same on every call until a weight changes."""

    def __init__(self, graph: Graph, aliasing: Aliasing) -> None:
        self.aliasing = aliasing
        self._known: dict[Node, bool] = {}
        for node in graph.nodes:
            self._known[node] = self._derived(node)

    def derive(self, node: Node) -> bool:
        """Is the value computed from weights alone? A rewrite keeps values, so an answer stays right."""
        if node not in self._known:
            self._known[node] = self._derived(node)
        return self._known[node]

    def _derived(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return is_weight(node) and not self.aliasing.written(node)
        if node.op not in ("call_function", "call_method") or not self.aliasing.effects(node).pure:
            return False
        return all(self.derive(n) for n in node.all_input_nodes) and not self.aliasing.written(node)
