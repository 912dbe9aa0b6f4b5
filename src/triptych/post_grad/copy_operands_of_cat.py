"""`copy_operands_of_cat`: operands whose memory somebody else sees are not computed into that of a concatenation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.effects import node_operands
from ..ir.program import Program
from ..rewrite.edits import SetArguments
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten
ATEN: dict[str, Any] = {"dialects": ("aten",)}
ROWS = torch.tensor([0, 2])


def _written_later(x: Any, rows: Any) -> Any:
    total = x.sum(0)
    return torch.cat([total, total * 2]), total.index_put((rows,), total.new_ones(2)).exp()


def _written_before(x: Any, rows: Any) -> Any:
    total = x.sum(0).index_put((rows,), x.new_ones(2))
    return torch.cat([total, total * 2]), total.exp()


def _write_in_place(graph: Graph) -> None:
    """For examples: a trace has no writes; `reinplace` makes them."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        node.target = aten.index_put_.default


class CopyOperandsOfCat(Rule):
    """cat([x, y]) -> cat([clone(x), y]), where x is written after the cat, or a view of x is returned

    Inductor computes an operand right into the memory of the concatenation, unless it knows that the operand needs
    memory of its own. It knows that of a value that is returned, and not of one that is written later, or of which a
    view is returned: the write would change the concatenation, and two results would share memory. A copy costs
    nothing more than the concatenation, which reads x in any case.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor":
            return
        for cat in program.graph.find_nodes(op="call_function", target=aten.cat.default):
            operands = dict.fromkeys(node_operands(cat.args[0]))
            if seen := [operand for operand in operands if _is_seen_beside(program, operand, cat)]:
                yield Match.at(program, cat, seen=seen)

    def rewrite(self, op, m):
        cat: Any = m.root.node
        copies = {operand: op.call(aten.clone.default, operand).node for operand in m.bindings["seen"]}
        operands, *dims = cat.args
        return SetArguments(cat, ([copies.get(operand, operand) for operand in operands], *dims), cat.kwargs)

    examples = [
        fires(lambda x, y: (lambda p: (torch.cat([p, x]), p.t()))(x @ y), "f32[4, 4]", "f32[4, 4]", **ATEN),
        fires(lambda x: (lambda s: (torch.cat([s, s]), s[1:]))(x.sum(0)), "f32[3, 4]", **ATEN),
        fires(_written_later, "f32[3, 4]", ROWS, **ATEN, prepare=_write_in_place),
        declines(_written_before, "f32[3, 4]", ROWS, **ATEN, prepare=_write_in_place),
        declines(lambda x: (lambda s: (torch.cat([s, s * 2]), s))(x.sum(0)), "f32[3, 4]", **ATEN),
        declines(lambda x, y: (torch.cat([x, y]), x.t()), "f32[4, 4]", "f32[4, 4]", **ATEN),
        declines(
            lambda x: (lambda s: (torch.cat([s, s * 2]), s[1:]))(x.sum(0)), "f32[3, 4]",
            dialects=("aten",), options={"codegen": "eager"},
        ),
    ]  # fmt: skip


def _is_seen_beside(program: Program, operand: Node, cat: Node) -> bool:
    """Does somebody write the memory of an operand after the cat, or see it outside the graph by way of a view?"""
    aliasing = program.aliasing
    if aliasing.is_input(operand):
        return False  # it has its place already
    is_viewed_outside = aliasing.is_output(operand) and operand.graph.output_node() not in operand.users
    return is_viewed_outside or any(cat < writer for writer in aliasing.writers(operand))


@dataclass(frozen=True)
class CopyOperandsOfCatPass(Pass):
    """Concatenates copies of operands that are written later, or of which a view is returned."""

    name = "copy_operands_of_cat"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (CopyOperandsOfCat(),)
