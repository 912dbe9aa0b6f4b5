"""Graphs whose recorded facts (shapes, strides) cannot be trusted: they are compiled without being rewritten."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from .. import _private
from .facts import tensor_fact
from .schema import packet_tags


def unreadable(graph: Graph) -> str | None:
    """Why the facts on the nodes of a torch-level graph cannot be trusted; None if they can."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if _opens_transform(node.target):
            # inside, values are wrapped: their actual rank differs from the one they show, and so do their gradients
            return f"{node.name} belongs to a function transform"
        if _changes_shape_in_place(node):
            # the same fake tensor is the fact of the value before and after the change
            return f"{node.name} changes the shape of a tensor in place"
    return None


def _opens_transform(target: Any) -> bool:
    """Is the target a function into which Dynamo expands `vmap`, `grad`, `jvp` and other transforms of `torch.func`?"""
    if isinstance(target, (str, _private.OpOverload, _private.HigherOrderOperator)):
        return False
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    return "_functorch" in module or name.endswith("_nesting") or "dual_level" in name


def _changes_shape_in_place(node: Node) -> bool:
    name = _name(node.target)
    if "inplace_view" not in packet_tags(name):
        return False
    return name != "detach_" or not _is_of_no_gradient(node.args[0])


def _name(target: Any) -> str:
    """The name of the operation, from the target alone: a call with unknown arguments changes the shape too."""
    if isinstance(target, _private.OpOverload):
        return target._schema.name.removeprefix("aten::")
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_of_no_gradient(value: Any) -> bool:
    """Was this value computed from tensors that need no gradient? Then `detach_` does nothing.

    `torch.export` writes `detach_(lift_fresh_copy(constant))` for `torch.tensor(2.0)`. The value's own fact cannot be
    used: it was recorded after the detach.
    """
    if not isinstance(value, Node) or value.op != "call_function" or value.kwargs.get("requires_grad"):
        return False
    operands = [tensor_fact(n) for n in value.all_input_nodes]
    return all(t is not None and not t.requires_grad for t in operands)
