"""Values that Inductor must write to memory, though it could compute them where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _private
from ..ir.effects import effects
from ..ir.facts import is_static, known, tensor_fact

REALIZE = "inductor_realize_to_strides"
"""Inductor writes a node with this mark to memory, with the strides that the graph says."""


def keep_gaps(returned: Sequence[Node]) -> None:
    """Write what results with gaps between their elements are views of. Inductor may copy such a view for another
    operation that reads it, and would then return the copy, which has no gaps."""
    for node in returned:
        tensor, base = tensor_fact(node), node
        if tensor is None or not is_static((*tensor.shape, *tensor.stride())) or not tensor.numel():
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        while span > tensor.numel() and (aliases := effects(base).aliases):
            base = aliases[0]
        if base is not node and base.op == "call_function":
            base.meta[REALIZE] = True


def keep_copied(graph: Graph) -> None:
    """Write what a copy reads as a view, where it is computed from the destination. Inductor would compute it inside
    the kernel that copies, which may then read elements that it has written already."""
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        destination, source = (_base(operand) for operand in copy.args[:2])
        if source is not copy.args[1] and source.op == "call_function" and _is_computed_from(source, destination):
            source.meta[REALIZE] = True


def _base(node: Any) -> Node:
    """What a view is a view of."""
    while aliases := effects(node).aliases:
        node = aliases[0]
    return node


def _is_computed_from(value: Node, operand: Node) -> bool:
    work, seen = [value], {value}
    while work:
        further = [n for n in work.pop().all_input_nodes if n not in seen]
        if operand in further:
            return True
        seen.update(further)
        work += further
    return False


def keep_masks(graph: Graph) -> None:
    """Write the mask of an attention once. Inductor would compute it anew for every layer that reads it, at the same
    time for all of them, and with an element for each head and batch where one is enough for all."""
    for node in graph.nodes:
        base = _mask(node)
        while base is not None and (aliases := effects(base).aliases):
            base = aliases[0]
        tensor = tensor_fact(base)
        if base is None or tensor is None or base.op != "call_function" or tensor.dim() == 0:
            continue
        if known(tensor.stride(-1) == 1):
            base.meta[REALIZE] = True


def _mask(node: Node) -> Node | None:
    """The mask that a kernel for attention reads; its backward reads it too."""
    if not isinstance(node.target, _private.OpOverload) or "_scaled_dot_product_" not in node.target.name():
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    mask = given.get("attn_bias", given.get("attn_mask"))
    return mask if isinstance(mask, Node) else None
