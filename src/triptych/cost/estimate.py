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
from ..ir.traits import is_view
from ..ir.work import ADDED_FIRST, declared_work, product_name
from .device import DeviceModel, device_model

ATTENTION = ("scaled_dot_product", "flex_attention", "flash_attention", "efficient_attention")
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
        work = declared_work(node)
        own = _flops(node) if work is None else work.flops
        gemms += own > 0 if work is None else work.gemms
        flops += own
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
    if any(attention in name for attention in ATTENTION):
        return _attention_flops(name, operands)
    if "convolution" in name or name.startswith("conv"):
        weight = next((value for value in operands[1:] if value.dim() > 2), None)
        if weight is None:
            return 0.0
        backward = BACKWARD_WORK["convolution"] if "backward" in name else 1.0
        produced = operands[0] if backward > 1 else first
        return backward * 2.0 * elements(produced.shape) * elements(weight.shape[1:])
    product = product_name(name)
    if not product:
        return 0.0
    positional = [value for operand in node.args if (value := tensor_fact(operand)) is not None]
    left = positional[1] if product in ADDED_FIRST and len(positional) > 1 else operands[0]
    return 2.0 * elements(first.shape) * size_hint(left.shape[-1] if left.dim() else 1)


def _attention_flops(name: str, operands: list[torch.Tensor]) -> float:
    backward = "backward" in name
    query, key = operands[1:3] if backward and len(operands) > 2 else (operands[0], operands[min(1, len(operands) - 1)])
    if query.dim() < 2 or key.dim() < 2:
        return 0.0
    length = key.shape[-2 if "scaled_dot_product" in name or "flex" in name or key.dim() < 4 else 1]
    forward = 4.0 * elements(query.shape) * size_hint(length)
    return forward * (BACKWARD_WORK["attention"] if backward else 1.0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
