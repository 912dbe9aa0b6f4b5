"""Rough estimates of what single operations of a graph cost.

Every operation counts as a separate kernel: it reads its operands and writes its result. Views, inputs and
constants cost nothing. The gain by fusion is visible only where kernels are counted instead of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import read
from ..ir.facts import fact, tensor_fact
from ..ir.sizes import bytes_of, elements, size_hint
from ..ir.traits import is_gemm, is_view
from .device import DeviceModel, device_model

ATTENTION = "scaled_dot_product"
BACKWARD_WORK = {"attention": 2.5, "convolution": 2.0}
"""Arithmetic of a backward relative to its forward."""


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
    name = _operation(node)
    if name == "getitem" or is_view(name):
        return FREE
    return group_cost([node], {node}, model)


def group_cost(
    nodes: Iterable[Node], inside: Collection[Node], model: Callable[[torch.device], DeviceModel] = device_model
) -> OperationCost:
    """The estimate for nodes that one kernel computes: values that only these nodes use are not read or written."""
    gemms, flops = 0, 0.0
    read_nodes: dict[Node, None] = {}
    written: list[torch.Tensor] = []
    for node in nodes:
        work = _flops(node)
        gemms += work > 0
        flops += work
        read_nodes |= dict.fromkeys(operand for operand in node.all_input_nodes if operand not in inside)
        if len(inside) == 1 or any(user not in inside for user in node.users):
            written += _tensors(fact(node))
    values = [*written, *(tensor for operand in read_nodes for tensor in _tensors(fact(operand)))]
    if not values:
        return OperationCost(gemms)
    moved = sum(bytes_of(value) for value in values)
    widest = max(values, key=bytes_of)
    device = model(widest.device)
    busy = max(flops / device.flops(widest.dtype), moved / device.bandwidth)
    return OperationCost(gemms, moved, device.launch + busy)


def _operation(node: Node) -> str:
    call = read(node)
    if call is not None:
        return call.op
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def _flops(node: Node) -> float:
    """Floating-point operations of a product, a convolution or an attention; 0 of everything else."""
    name = _operation(node)
    first = next(iter(_tensors(fact(node))), None)
    operands = [value for operand in node.all_input_nodes if (value := tensor_fact(operand)) is not None]
    if first is None or not operands:
        return 0.0
    if ATTENTION in name:
        return _attention_flops(name, operands)
    if "convolution" in name or name.startswith("conv"):
        weight = next((value for value in operands[1:] if value.dim() > 2), None)
        if weight is None:
            return 0.0
        backward = BACKWARD_WORK["convolution"] if "backward" in name else 1.0
        produced = operands[0] if backward > 1 else first
        return backward * 2.0 * elements(produced.shape) * elements(weight.shape[1:])
    if not is_gemm(name):
        return 0.0
    # the first operand of `addmm` and its variants is the tensor that is added to the product
    left = operands[-2:][0] if name in ("addmm", "baddbmm", "addbmm") else operands[0]
    return 2.0 * elements(first.shape) * size_hint(left.shape[-1] if left.dim() else 1)


def _attention_flops(name: str, operands: list[torch.Tensor]) -> float:
    backward = "backward" in name
    query, key = operands[1:3] if backward and len(operands) > 2 else (operands[0], operands[min(1, len(operands) - 1)])
    if query.dim() < 2 or key.dim() < 2:
        return 0.0
    forward = 4.0 * elements(query.shape) * size_hint(key.shape[-2])
    return forward * (BACKWARD_WORK["attention"] if backward else 1.0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
