"""Matrix products that read a gathered tensor, or compute one that is scattered, as fused operators take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.effects import node_operands
from ..ir.facts import tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.refusal import Refusal
from .arrangement import is_reshape

aten = torch.ops.aten

PLAIN, WITH_BIAS, SCALED = aten.mm.default, aten.addmm.default, aten._scaled_mm.default
LEFT = {PLAIN: 0, WITH_BIAS: 1, SCALED: 0}
"""The position of the left operand among the arguments of each kind of product."""

MOST_MOVED = 64
"""Search budget: how many nodes may be moved to make the operands of a product available."""


@dataclass(frozen=True)
class Product:
    """A product of two matrices: plain, with a bias that is added, or of scaled 8-bit floats."""

    node: Node
    left: Node
    right: Node
    bias: Node | None = None
    left_scale: Node | None = None
    right_scale: Node | None = None
    result_scale: Node | None = None
    dtype: torch.dtype | None = None
    """The dtype of the result of a scaled product, if the call specifies it."""
    fast: bool = False

    @property
    def is_scaled(self) -> bool:
        return self.left_scale is not None

    @property
    def columns(self) -> int:
        return int(tensor_of(self.right).shape[1])

    @property
    def others(self) -> list[Node]:
        """All operands but the left one."""
        return [n for n in node_operands((self.node.args, self.node.kwargs)) if n is not self.left]


def product(program: Program, node: Node) -> Product | None:
    """The product that a node computes, if a fused operator can compute it: `alpha` and `beta` must be 1, and a plain
    product must not specify a dtype."""
    if node.target not in LEFT:
        return None
    call = program.call(node)
    if call is None or tensor_fact(node) is None:
        return None
    if node.target is not SCALED:
        left, right = (node.args[LEFT[node.target] + i] for i in (0, 1))
        factors = [call.get(name) for name in ("alpha", "beta")] if node.target is WITH_BIAS else []
        nodes = isinstance(left, Node) and isinstance(right, Node)
        if not nodes or any(type(f) not in (int, float) or f != 1 for f in factors):
            return None
        return Product(node, left, right, node.args[0] if factors else None)  # type: ignore[arg-type]
    names = [a.name for a in SCALED._schema.arguments]
    arguments: dict[str, Any] = {**dict(zip(names, node.args)), **node.kwargs}
    return Product(
        node, arguments["self"], arguments["mat2"], arguments.get("bias"), arguments["scale_a"], arguments["scale_b"],
        arguments.get("scale_result"), arguments.get("out_dtype"), bool(arguments.get("use_fast_accum", False)),
    )  # fmt: skip


@dataclass(frozen=True)
class Readers:
    """The nodes that read a gathered tensor."""

    views: tuple[Node, ...]
    """Views of it that keep the order of its elements."""
    products: tuple[Product, ...]
    """Products with one of these as left operand, a matrix with the rows of the gathered tensor."""
    others: tuple[Node, ...]


def readers(program: Program, value: Node, width: int | None) -> Readers:
    """The nodes that read a tensor, directly or through views. `width` is how many columns a product must read; None:
    as many as the first one does."""
    views, others = [value], []
    products: list[Product] = []
    for view in views:
        for user in view.users:
            candidate = product(program, user)
            if candidate is not None and candidate.left is view and view not in candidate.others:
                columns = tensor_of(view).shape[1]
                width = columns if width is None else width
                if columns == width:
                    products.append(candidate)
                    continue
            if is_reshape(program, user, other_dtype=True):
                views.append(user)
            elif user not in others:
                others.append(user)
    return Readers(tuple(views[1:]), tuple(products), tuple(others))


def moved_before(
    program: Program, roots: Iterable[Node], anchor: Node, behind: Collection[Node]
) -> list[Node] | Refusal:
    """The nodes to move before `anchor`, in this order, so that `roots` are available; a refusal if one cannot move."""
    aliasing = program.aliasing
    work, needed = list(roots), dict[Node, None]()
    while work:
        node = work.pop()
        if node < anchor or node in needed:
            continue
        is_free = node not in behind and aliasing.effects(node).pure and len(needed) < MOST_MOVED
        if not is_free or aliasing.written_between(node.all_input_nodes, anchor, node) is not None:
            return Refusal("{at} is needed first, and cannot be moved", at=node)
        needed[node] = None
        work += node.all_input_nodes
    return sorted(needed)
