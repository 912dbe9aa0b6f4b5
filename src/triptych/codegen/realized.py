"""Values that Inductor must write to memory, though it could compute them where they are read."""

from __future__ import annotations

import functools
import operator
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
    """For results with gaps between their elements, write the values that they are views of. Inductor may copy such a
    view for another operation that reads it, and would then return the copy, which has no gaps."""
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
    """If the source of a copy is a view of a value that is computed from the destination, write that value. Inductor
    would compute it inside the kernel that copies, which may then read elements that it has written already."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if not copies:
        return
    bases = [tuple(_base(operand) for operand in copy.args[:2]) for copy in copies]
    bit = {destination: 1 << number for number, destination in enumerate({destination for destination, _ in bases})}
    computed_from: dict[Node, int] = {}
    """The destinations that a value depends on, a bit for each: one walk over the graph for all copies."""
    for node in graph.nodes:
        computed_from[node] = functools.reduce(
            operator.or_, (computed_from[n] | bit.get(n, 0) for n in node.all_input_nodes), 0
        )
    for copy, (destination, source) in zip(copies, bases):
        is_view = source is not copy.args[1]
        if is_view and source.op == "call_function" and computed_from[source] & bit[destination]:
            source.meta[REALIZE] = True


def _base(node: Any) -> Node:
    """The value that a view, or a view of a view, is a view of."""
    while aliases := effects(node).aliases:
        node = aliases[0]
    return node


def keep_masks(graph: Graph) -> None:
    """Write the mask of an attention once. Inductor would compute it again for every layer that reads it, for all
    layers at the same time, and expanded over heads and batch where it need not be."""
    for mask in filter(None, map(_mask, graph.nodes)):
        base = _base(mask)
        tensor = tensor_fact(base)
        if base.op == "call_function" and tensor is not None and tensor.dim() and known(tensor.stride(-1) == 1):
            base.meta[REALIZE] = True


def _mask(node: Node) -> Node | None:
    """The mask that a kernel for attention reads."""
    if not isinstance(node.target, _private.OpOverload) or "_scaled_dot_product_" not in node.target.name():
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = {**dict(zip(names, node.args)), **node.kwargs}
    mask = arguments.get("attn_bias", arguments.get("attn_mask"))
    return mask if isinstance(mask, Node) else None
