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
from ..cost import Moved, Product, Work
from ..cost.communication import Communicated, CommunicationCost, Link, communication_cost, link_of
from ..cost.device import DeviceModel, nominal_model
from ..cost.estimate import operation_cost
from ..cost.parts import Part
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
    products = [_product(max(1, rows // ranks), int(b.shape[1]), int(b.shape[0]), b.dtype) for b in rights]
    computation = _on_every_rank(left.device, ranks * products).seconds()
    size = parts * left.numel() * left.element_size()
    if not gathers:
        result = tensor_fact(node)
        size = 0 if result is None else ranks * (bytes_moved(result) or 0)
    way = link_of(link, left.device.type, ranks)
    kind = ALL_GATHER if gathers else REDUCE_SCATTER
    return FusedCost(computation, communication_cost(kind, size, ranks, way).seconds, size)


def _product(rows: int, columns: int, inner: int, dtype: torch.dtype) -> Product:
    # 8-bit floats are multiplied at least as quickly as 16-bit ones
    return Product.sized(rows, columns, inner, torch.bfloat16 if dtype.itemsize == 1 else dtype)


# ---- the work of rewrites: every rank must make the same decision ----


def _on_every_rank(device: torch.device, *parts: Part | Sequence[Part]) -> Work:
    return Work.of(device, *parts, on_every_rank=True)


ROWS, COLUMNS, INNER = range(3)
"""The sizes of a product, by position: which of them an operator of symmetric memory divides by the ranks."""


@dataclass(frozen=True)
class Pipelined(Part):
    """An operator that computes a part of its products for each rank while the others are under way."""

    communicated: Communicated
    computed: tuple[Product, ...]
    """The products of all ranks' parts."""

    launches = 0

    def seconds(self, model: DeviceModel) -> float:
        both = self.communicated.seconds(model), sum(product.modelled(model) for product in self.computed)
        # the first part that arrives, or the last one that is sent, has nothing to overlap with
        return max(both) + min(both) / self.communicated.ranks


def pipelining(
    communication: Collective, products: Sequence[tuple[Node, Node]], divided: int, link: str
) -> tuple[Work, Work] | None:
    """A collective and products one after the other, and the operator that does both at a time; None if sizes are
    symbolic. A product is given by its operands."""
    size, ranks = bytes_of_collective(communication), ranks_of(communication)
    operands = [(tensor_of(left), tensor_of(right)) for left, right in products]
    if size is None or not all(is_static(tensor.shape) for pair in operands for tensor in pair):
        return None
    way, device = link_for(communication, link), operands[0][0].device
    communicated = Communicated(communication.kind, size, ranks, way)

    def computed(parts: int) -> list[Product]:
        pieces = []
        for left, right in operands:
            sizes = [int(left.shape[0]), int(right.shape[1]), int(left.shape[1])]
            sizes[divided] = math.ceil(sizes[divided] / parts)
            rows, columns, inner = sizes
            pieces += parts * [_product(rows, columns, inner, left.dtype)]
        return pieces

    pipelined = Pipelined(communicated, tuple(computed(ranks)))
    return _on_every_rank(device, communicated, computed(1)), _on_every_rank(device, pipelined)


def joining(members: Sequence[Collective], copied_results: int, link: str, copies: bool) -> tuple[Work, Work]:
    """Several collectives, and one that replaces them. With `copies`, operands are copied into one tensor, and
    `copied_results` bytes of results are copied out of another."""
    first = members[0]
    sizes = [bytes_of_collective(member) or 0 for member in members]
    device, ranks, way = tensor_of(first.operands[0]).device, ranks_of(first), link_for(first, link)
    apart = [Communicated(first.kind, size, ranks, way) for size in sizes]
    operands = sum(bytes_moved(tensor_of(member.operands[0])) or 0 for member in members)
    copied = [Moved(2 * moved) for moved in (operands, copied_results) if moved] if copies else []
    together = Communicated(first.kind, sum(sizes), ranks, way)
    return _on_every_rank(device, apart), _on_every_rank(device, together, copied)
