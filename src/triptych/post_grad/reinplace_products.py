"""Sums of products: each product is added in place to the sum so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from ..ir.effects import node_operands
from ..ir.overwriting import LaterUses, Operands, overwrite
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import WriteInPlace
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten

IN_PLACE = {aten.addmm.default: aten.addmm_.default, aten.baddbmm.default: aten.baddbmm_.default}
PRODUCTS = frozenset((*IN_PLACE, aten.mm.default, aten.bmm.default))
ATEN: dict[str, Any] = {"dialects": ("aten",)}


def _added(a: Any, b: Any, c: Any) -> Any:
    return torch.addmm(torch.addmm(a @ b, b, c), c, a)


def _added_batches(a: Any, b: Any) -> Any:
    return torch.baddbmm(torch.bmm(a, b), b, a, beta=2)


def _read_again(a: Any, b: Any) -> Any:
    product = a @ b
    return torch.addmm(product, b, a), product


class ReinplaceAddedProducts(Rule):
    """y = addmm(x, a, b) -> addmm_(x, a, b), y is x, where x is a product too

    Valid where x meets the conditions of `reinplace_indexed_writes`. A product that is added to another tensor begins
    with a copy of that tensor, and both are in memory; the in-place form needs no copy. `baddbmm` is treated in the
    same way. If x is not a product, Inductor may fuse its computation with that copy, so the rule leaves it alone.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if not any(n.target in IN_PLACE for n in program.graph.nodes):
            return
        later = LaterUses(program)
        for node in later.walk():
            total = node.args[0] if node.args else None
            if node.target not in IN_PLACE or not node.users or not isinstance(total, Node):
                continue
            if total.target not in PRODUCTS:
                continue
            operands = Operands(program, [total], node_operands((node.args[1:], node.kwargs)))
            plan = overwrite(later, node, total, operands)
            if isinstance(plan, Refusal):
                yield Match.at(program, node, problem=plan)
            else:
                yield Match.at(program, node, plan=plan)

    def rewrite(self, op, m):
        node, plan = m.root.node, m.bindings["plan"]
        op.call(IN_PLACE[node.target], plan.destination, *node.args[1:], **node.kwargs)
        return WriteInPlace(node, [(plan.value, plan.destination)], [])

    examples = [
        fires(_added, "f32[4, 4]", "f32[4, 4]", "f32[4, 4]", **ATEN),
        fires(_added_batches, "f32[2, 4, 4]", "f32[2, 4, 4]", **ATEN),
        declines(_read_again, "f32[4, 4]", "f32[4, 4]", because="is used afterwards", **ATEN),
        declines(lambda a, b: torch.addmm(p := a @ b, p, b), "f32[4, 4]", "f32[4, 4]", because="may share memory",
                 **ATEN),
        declines(lambda x, a, b: torch.addmm(x, a, b), "f32[4, 4]", "f32[4, 4]", "f32[4, 4]", **ATEN),
    ]  # fmt: skip
