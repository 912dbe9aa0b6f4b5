"""Costs of the communication and the computation of a graph, from figures that are the same on every rank.

Symbolic sizes are not used: their values may differ between ranks, and all ranks must make the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..cost.communication import CommunicationCost, Link, communication_cost, link_of
from ..cost.device import nominal_model
from ..cost.estimate import operation_cost
from ..ir.collectives import ALL_GATHER, REDUCE_SCATTER, Collective, bytes_moved, collective, is_wait
from ..ir.facts import fact, is_static, tensor_fact, tensor_of


def ranks_of(communication: Collective) -> int:
    """How many ranks take part; for an all-reduce, the size of its process group."""
    return communication.ranks if communication.ranks is not None else ranks_of_group(communication.group)


def ranks_of_group(name: str) -> int:
    try:
        return int(_private.resolve_process_group(name).size())
    except (RuntimeError, KeyError, ValueError):  # this process does not have the groups of the graph
        return 2


def bytes_of_collective(communication: Collective) -> int | None:
    """Bytes of the whole tensors that are gathered or reduced; None if sizes are symbolic."""
    sides = [
        [bytes_moved(tensor_fact(node)) for node in nodes] for nodes in (communication.operands, communication.results)
    ]
    if any(size is None for side in sides for size in side):
        return None
    return max(sum(size for size in side if size is not None) for side in sides)


def link_for(communication: Collective, name: str) -> Link:
    operand = tensor_fact(communication.operands[0])
    return link_of(name, "cpu" if operand is None else operand.device.type, ranks_of(communication))


def collective_cost(communication: Collective, link: str) -> CommunicationCost | None:
    size = bytes_of_collective(communication)
    return (
        None
        if size is None
        else communication_cost(communication.kind, size, ranks_of(communication), link_for(communication, link))
    )


def compute_seconds(node: Node) -> float:
    """Seconds to compute a node; 0 if sizes are symbolic, and for collectives and waits."""
    if is_wait(node) or collective(node) is not None:
        return 0.0
    values = [fact(node), *map(fact, node.all_input_nodes)]
    tensors = [t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,))]
    if not all(is_static(t.shape) for t in tensors if isinstance(t, torch.Tensor)):
        return 0.0
    return operation_cost(node, nominal_model).seconds


@dataclass(frozen=True)
class FusedCost:
    """The cost of an operator of symmetric memory, which computes and communicates at the same time."""

    computation: float
    communication: float
    bytes: int
    """How many bytes are communicated."""


def fused_cost(node: Node, link: str) -> FusedCost:
    """The cost of an operator that gathers and multiplies, or multiplies and scatters, part by part."""
    target: Any = node.target
    arguments = dict(zip((argument.name for argument in target._schema.arguments), node.args))
    gathers = "all_gather" in target._schema.name
    left, ranks = tensor_fact(arguments["A"]), ranks_of_group(str(arguments["group_name"]))
    rights = [t for n in (arguments["Bs"] if gathers else [arguments["B"]]) if (t := tensor_fact(n)) is not None]
    if left is None or not all(is_static(t.shape) for t in (left, *rights)):
        return FusedCost(0.0, 0.0, 0)
    parts = ranks if gathers else 1
    rows = parts * left.numel() // left.shape[-1]
    device = nominal_model(left.device)
    computation = ranks * sum(
        device.gemm(max(1, rows // ranks), int(b.shape[1]), int(b.shape[0]), _multiplied_as(b.dtype)) for b in rights
    )
    size = parts * left.numel() * left.element_size()
    if not gathers:
        result = tensor_fact(node)
        size = 0 if result is None else ranks * (bytes_moved(result) or 0)
    way = link_of(link, left.device.type, ranks)
    kind = ALL_GATHER if gathers else REDUCE_SCATTER
    return FusedCost(computation, communication_cost(kind, size, ranks, way).seconds, size)


def _multiplied_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose rate is assumed: 8-bit floats are multiplied at least as quickly as 16-bit ones."""
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


ROWS, COLUMNS, INNER = range(3)
"""The sizes of a product, by position: which of them an operator of symmetric memory divides by the ranks."""


def pipelining_costs(
    communication: Collective, products: Sequence[tuple[Node, Node]], divided: int, link: str
) -> tuple[float, float] | None:
    """Seconds of a collective and products one after the other, and of an operator that computes a part for each rank
    while the others are under way; None if sizes are symbolic. A product is given by its operands."""
    cost, ranks = collective_cost(communication, link), ranks_of(communication)
    operands = [(tensor_of(left), tensor_of(right)) for left, right in products]
    if cost is None or not all(is_static(tensor.shape) for pair in operands for tensor in pair):
        return None
    device = nominal_model(operands[0][0].device)

    def computing(parts: int) -> float:
        seconds = 0.0
        for left, right in operands:
            sizes = [int(left.shape[0]), int(right.shape[1]), int(left.shape[1])]
            sizes[divided] = math.ceil(sizes[divided] / parts)
            rows, columns, inner = sizes
            seconds += parts * device.gemm(rows, columns, inner, _multiplied_as(left.dtype))
        return seconds

    # the first part that arrives, or the last one that is sent, has nothing to overlap with
    both = (cost.seconds, computing(ranks))
    return cost.seconds + computing(1), max(both) + min(both) / ranks


def joining_costs(members: Sequence[Collective], copied_results: int, link: str, copies: bool) -> tuple[float, float]:
    """Seconds of several collectives, and of one that replaces them. With `copies`, operands are copied into one
    tensor, and `copied_results` bytes of results are copied out of another."""
    first = members[0]
    sizes = [bytes_of_collective(member) or 0 for member in members]
    ranks, way = ranks_of(first), link_for(first, link)
    before = sum(communication_cost(first.kind, size, ranks, way).seconds for size in sizes)
    after = communication_cost(first.kind, sum(sizes), ranks, way).seconds
    if copies:
        device = nominal_model(tensor_of(first.operands[0]).device)
        operands = sum(bytes_moved(tensor_of(member.operands[0])) or 0 for member in members)
        after += device.copy(2 * operands) + (device.copy(2 * copied_results) if copied_results else 0.0)
    return before, after
