"""`copy_operands_of_cat`: copies operands of a concatenation that must not share memory with its result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.effects import node_operands
from ..ir.partitioned import results
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


def _cat_written(x: Any, rows: Any) -> Any:
    total = x.sum(0)
    both = torch.cat([total, total * 2])
    return both.index_put((rows,), x.new_ones(2)).exp(), total.cos()


def _write_in_place(graph: Graph) -> None:
    """For examples: a traced graph has no in-place writes; in a compile, `reinplace` introduces them."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        node.target = aten.index_put_.default


class CopyOperandsOfCat(Rule):
    """cat([x, y]) -> cat([clone(x), y]), where a write to one of x and the result would be visible in the other

    Inductor computes an operand right into the memory of the concatenation, unless it knows that the operand needs
    memory of its own. It knows that of a value that is returned. It does not know it of a value that is written after
    the concatenation, or that is read after a write to the concatenation, or of which a view is returned. In the last
    case two results would share memory, and the view would have the strides of the concatenation.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor":
            return
        returned = {program.aliasing.memory(node) for node in results(program.graph)}
        for cat in program.graph.find_nodes(op="call_function", target=aten.cat.default):
            operands = dict.fromkeys(node_operands(cat.args[0]))
            if shared := [operand for operand in operands if _may_not_share(program, operand, cat, returned)]:
                yield Match.at(program, cat, shared=shared)

    def rewrite(self, op, m):
        cat: Any = m.root.node
        copies = {operand: op.call(aten.clone.default, operand).node for operand in m.bindings["shared"]}
        operands, *dims = cat.args
        return SetArguments(cat, ([copies.get(operand, operand) for operand in operands], *dims), cat.kwargs)

    examples = [
        fires(lambda x, y: (lambda p: (torch.cat([p, x]), p.t()))(x @ y), "f32[4, 4]", "f32[4, 4]", **ATEN),
        fires(lambda x: (lambda s: (torch.cat([s, s]), s[1:]))(x.sum(0)), "f32[3, 4]", **ATEN),
        fires(_written_later, "f32[3, 4]", ROWS, **ATEN, prepare=_write_in_place),
        fires(_cat_written, "f32[3, 4]", ROWS, **ATEN, prepare=_write_in_place),
        declines(_written_before, "f32[3, 4]", ROWS, **ATEN, prepare=_write_in_place),
        declines(lambda x: (lambda s: (torch.cat([s, s * 2]), s))(x.sum(0)), "f32[3, 4]", **ATEN),
        declines(lambda x, y: (torch.cat([x, y]), x.t()), "f32[4, 4]", "f32[4, 4]", **ATEN),
        declines(
            lambda x: (lambda s: (torch.cat([s, s * 2]), s[1:]))(x.sum(0)), "f32[3, 4]",
            dialects=("aten",), options={"codegen": "eager"},
        ),
    ]  # fmt: skip


def _may_not_share(program: Program, operand: Node, cat: Node, returned: Collection[Node]) -> bool:
    """Would it be visible if the operand shared memory with the cat? `returned`: the memory of the graph's results."""
    aliasing = program.aliasing
    if aliasing.is_input(operand):
        return False  # an input has memory already
    if any(cat < writer for writer in aliasing.writers(operand)):
        return True
    if operand.graph.output_node() in operand.users:
        return False  # Inductor allocates separate memory for it
    if aliasing.memory(operand) in returned:
        return True
    if aliasing.memory(cat) in returned and aliasing.is_output(operand):
        return True  # a view is kept for the backward, and the caller may write the concatenation before that runs
    writes = [writer for writer in aliasing.writers(cat) if cat < writer]
    return bool(writes) and _is_read_after(program, operand, min(writes))


def _is_read_after(program: Program, value: Node, place: Node) -> bool:
    """Is the value, or a view of it, used after a place of the graph?"""
    work, seen = [value], {value}
    while work:
        node = work.pop()
        if any(place < user for user in node.users):
            return True
        views = [user for user in node.users if user not in seen and node in program.aliasing.effects(user).aliases]
        seen.update(views)
        work += views
    return False


@dataclass(frozen=True)
class CopyOperandsOfCatPass(Pass):
    """Concatenates copies of operands that may not share memory with the concatenation."""

    name = "copy_operands_of_cat"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (CopyOperandsOfCat(),)
