"""Rough estimates of what single operations of a graph cost.

Every operation counts as a separate kernel: it reads its operands and writes its result. Views, inputs and
constants cost nothing. The gain by fusion is visible only where kernels are counted instead of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.calls import Call, read
from ..ir.facts import fact, is_contiguous, tensor_fact
from ..ir.traits import is_view
from .arithmetic import count_products, flops, tensors
from .device import DeviceModel, device_model
from .library_kernels import LibraryKernel, kernel_of_library
from .parts import Operand, Part

GATHERS = {
    "embedding": "weight", "index": "self", "index_select": "self", "gather": "self", "take": "self",
    "take_along_dim": "self", "_unsafe_index": "self", "_unsafe_masked_index": "self",
}  # fmt: skip
"""Operations that read as many elements of an operand as the result has, and the name of that operand."""
UNREAD = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that only allocate."""
SHAPE_ONLY = {
    "full_like": "self", "zeros_like": "self", "ones_like": "self", "new_full": "self", "new_zeros": "self",
    "new_ones": "self", "rand_like": "self", "randn_like": "self",
}  # fmt: skip
"""Operations that look at the sizes of an operand, not at its elements."""


@dataclass(frozen=True)
class Computed(Part):
    """What one kernel reads, writes and multiplies."""

    moved: float
    work: float
    precision: torch.dtype
    times: float = 1.0
    """How often the operands are moved."""
    rate: float = 1.0
    """The fraction of the usual rate of arithmetic."""
    launches: int = 1

    @property
    def bytes(self) -> float:
        return self.moved

    @property
    def flops(self) -> float:
        return self.work

    @property
    def dtype(self) -> torch.dtype:
        return self.precision

    def seconds(self, model: DeviceModel) -> float:
        return max(self.work / (self.rate * model.flops(self.precision)), self.times * self.moved / model.bandwidth)


@dataclass(frozen=True)
class OperationCost:
    """The estimate for one operation, or for several together."""

    gemms: int = 0
    """1 for a matrix product, a convolution or an attention."""
    bytes: int = 0
    """Read and written."""
    seconds: float = 0.0


FREE = OperationCost()


def operation_cost(node: Node, model: Callable[[torch.device], DeviceModel] = device_model) -> OperationCost:
    """The estimate for one node."""
    if node.op in ("placeholder", "get_attr", "output"):
        return FREE
    call = read(node)
    if call is not None and _does_nothing(node, call):
        return FREE
    return group_cost([node], {node}, model)


def _does_nothing(node: Node, call: Call) -> bool:
    """Does the call neither read nor write elements? A cast and `contiguous` do, unless they return their operand."""
    source, result = tensor_fact(call.args.get("self")), tensor_fact(node)
    if call.op == "to" and source is not None and result is not None:
        return (source.dtype, source.device) == (result.dtype, result.device)
    if call.op == "contiguous" and source is not None:
        return is_contiguous(source)
    return call.op == "getitem" or call.op in UNREAD or is_view(call.op)


def group_cost(
    nodes: Iterable[Node], inside: Collection[Node], model: Callable[[torch.device], DeviceModel] = device_model
) -> OperationCost:
    """The estimate for nodes that one kernel computes: values that only these nodes use are not read or written."""
    nodes = list(nodes)
    gemms = sum(map(count_products, nodes))
    moved: dict[Node, float] = {}
    for node in nodes:
        for operand, count in _read(node).items():
            if operand not in inside:
                moved[operand] = max(moved.get(operand, 0.0), count)
        if len(inside) == 1 or any(user not in inside for user in node.users):
            moved[node] = _bytes(node)
    values = [tensor for node in (*nodes, *moved) for tensor in tensors(fact(node))]
    if not values:
        return OperationCost(gemms)
    multiplied = next((t for n in nodes if flops(n) for o in n.all_input_nodes for t in tensors(fact(o))), values[0])
    device = model(values[0].device)
    library = kernel_of_library(nodes[0], device) if len(nodes) == 1 else LibraryKernel()
    part = Computed(sum(moved.values()), sum(map(flops, nodes)), multiplied.dtype, *library)
    return OperationCost(gemms, int(part.bytes), part.modelled(device))


def _bytes(node: Node) -> float:
    """Of the value of a node; elements of an expanded tensor are in memory once."""
    return sum(Operand.of(tensor).bytes for tensor in tensors(fact(node)) if tensor.layout == torch.strided)


def _read(node: Node) -> dict[Node, float]:
    """The bytes that an operation reads of each operand."""
    call = read(node)
    counts = {operand: _bytes(operand) for operand in node.all_input_nodes}
    if call is None:
        return counts
    if isinstance(source := call.args.get(GATHERS.get(call.op, "")), Node):
        counts[source] = min(counts.get(source, math.inf), _bytes(node))
    if isinstance(like := call.args.get(SHAPE_ONLY.get(call.op, "")), Node):
        counts[like] = 0.0
    return counts
