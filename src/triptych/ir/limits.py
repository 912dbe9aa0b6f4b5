"""Graphs whose facts do not hold for the whole of them: these are compiled as they are."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from .. import _private
from .calls import read
from .schema import packet_tags


def unreadable(graph: Graph) -> str | None:
    """Why the facts on the nodes of a torch-level graph cannot be trusted; None if they can."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if _opens_transform(node.target):
            # inside, values are wrapped: they have another rank than they show, and gradients of their own
            return f"{node.name} belongs to a function transform"
        if _changes_shape_in_place(node):
            # one fake tensor stands for the value before and after
            return f"{node.name} changes the shape of a tensor in place"
    return None


def _opens_transform(target: Any) -> bool:
    """What `torch.func` leaves in a graph: `vmap`, `grad`, `jvp` and their like, written out."""
    if isinstance(target, (str, _private.OpOverload, _private.HigherOrderOperator)):
        return False
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    return "_functorch" in module or name.endswith("_nesting") or "dual_level" in name


def _changes_shape_in_place(node: Node) -> bool:
    call = read(node)
    return call is not None and call.mutates and "inplace_view" in packet_tags(call.op)
