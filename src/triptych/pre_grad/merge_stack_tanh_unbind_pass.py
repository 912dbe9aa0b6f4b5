"""merge_stack_tanh_unbind_pass: pieces of a value that are stacked for pointwise operations and then unbound again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch.fx import Node

from ..ir.effects import node_operands
from ..ir.facts import known_equal
from ..ir.program import Program
from ..ir.traits import is_pointwise
from ..pieces.blocks import Block, neighbours_joined
from ..pieces.index_map import IndexMap
from ..pieces.nested import joined_operands
from ..pieces.plan import Step, build, plan
from ..pieces.read import Way, way_of
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule


@dataclass(frozen=True, eq=False)
class _Site:
    """unbind(f(stack(pieces of a source, d)), d)"""

    unbind: Node
    applied: list[Node]
    """The pointwise operations, last first."""
    stack: Node
    ways: list[Way]
    part: Sequence[Step]
    """The views that take from the source the part that the pieces make up together."""
    dim: int
    """The dim of the source along which it was split into the pieces."""
    are_rows: bool
    """The pieces have one dim less than the source: it was unbound, or split into pieces of size one that were
    squeezed."""

    @property
    def covered(self) -> list[Node]:
        on_the_way = [n for way in self.ways for n in way.nodes]
        return [self.unbind, *self.applied, self.stack, *dict.fromkeys(on_the_way)]


def _applied_to(program: Program, node: Node) -> Node | None:
    """The operand of a pointwise operation on a single tensor; None for any other node."""
    call = program.call(node)
    if call is None or call.mutates or not is_pointwise(call.op) or "memory_format" in call.args:
        return None
    operands = list(node_operands((node.args, node.kwargs)))
    return operands[0] if len(operands) == 1 and program.aliasing.effects(node).pure else None


def _site(program: Program, unbind: Node) -> _Site | None:
    call = program.call(unbind)
    if call is None or call.op != "unbind" or call.mutates or not isinstance(call.args["self"], Node):
        return None
    at, applied = call.args["self"], []
    while (operand := _applied_to(program, at)) is not None and len(at.users) == 1:
        applied.append(at)
        at = operand
    stacked = joined_operands(program, at, "stack", call.get("dim"))
    if stacked is None or len(at.users) != 1 or not applied:
        return None
    pieces = [way_of(program, t, frozenset(["split", "unbind", "squeeze"])) for t in stacked]
    ways = [w for w in pieces if w is not None and 2 <= len(w.nodes) <= 3]
    if len(ways) < len(stacked) or len({w.nodes[-1] for w in ways}) > 1:
        return None
    split_call = program.call(ways[0].nodes[-1])
    assert split_call is not None
    dim, rank = split_call.get("dim"), len(ways[0].map.sizes)
    are_rows = len(ways[0].map.axes) < rank
    maps = [w.map.unsqueeze(dim) if are_rows else w.map for w in ways]
    if any(not _is_cut_along(m, dim) for m in maps):
        return None
    blocks = neighbours_joined([Block(m, (w,)) for m, w in zip(maps, ways)], dim)
    part = plan(blocks[0].map) if len(blocks) == 1 else None
    return None if part is None else _Site(unbind, applied, at, ways, part, dim, are_rows)


def _is_cut_along(piece: IndexMap, dim: int) -> bool:
    """Does the piece have the shape of the source, except for its size along this dim?"""
    shape, sizes = piece.shape, piece.sizes
    return len(shape) == len(sizes) and all(d == dim or known_equal(shape[d], sizes[d]) for d in range(len(sizes)))


class MergeStackTanhUnbind(Rule):
    """unbind(tanh(stack(split(x)))) -> split(tanh(x)), for any pointwise operations; unbind(x) likewise"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in list(program.graph.nodes):
            site = None if node._erased else _site(program, node)
            users = [] if site is None else list(node.users)
            if site is not None and users and all(u.target is getitem for u in users):
                yield Match.at(program, *users, covers=site.covered, before=node, site=site)

    def rewrite(self, op, m, site):
        value = build(op, m.program.value(site.ways[0].source), site.part)
        before = site.stack
        for node in reversed(site.applied):
            value = op.again(node, {before: value.node})
            before = node
        if site.are_rows:
            pieces = op.unbind(value, dim=site.dim)
        else:
            pieces = op.split(value, [w.map.shape[site.dim] for w in site.ways], dim=site.dim)
        return tuple(op.getitem(pieces, user.node.args[1] % len(site.ways)) for user in m.roots)

    examples = [
        fires(lambda x: [r + 1 for r in torch.stack(x.split(2)).tanh().unbind()], "f32[6, 4]"),
        fires(lambda x: [r + 1 for r in torch.unbind(torch.tanh(torch.stack(x.unbind()[1:])))], "f32[6, 4]"),
        fires(lambda x: [r + 1 for r in torch.stack(x.chunk(3)).mul(2).relu().unbind(0)[:2]], "f32[6]"),
        fires(lambda x, w: [r @ w for r in torch.stack(x.chunk(3, 1)).tanh().unbind()], "f32[4, 6]", "f32[2, 2]"),
        fires(lambda x: [r + 1 for r in torch.stack(x.split(2)).sigmoid().unbind()], "f32[6, 4]", dynamic=True,
              dialects=["torch"]),
        fires(lambda x: [r + 1 for r in torch.stack(x.split(2, 1)).tanh().unbind()], "f32[4, 6]"),
        fires(lambda x: [r + 1 for r in torch.stack([p.squeeze(1) for p in x.split(1, 1)]).tanh().unbind()],
              "f32[4, 3, 2]"),
        fires(lambda x: [r + 1 for r in torch.stack([p.squeeze() for p in x.chunk(3)[1:]], 1).tanh().unbind(1)],
              "f32[3, 4]"),
        declines(lambda x: [r + 1 for r in torch.stack([p.squeeze(2) for p in x.split(2, 1)]).tanh().unbind()],
                 "f32[4, 6, 1]"),
        declines(lambda x: torch.stack(x.split(2, 1)).tanh().unbind(), "f32[4, 6]", because="leaves the graph"),
        declines(lambda x: (lambda s: [s.sum(), *s.unbind()])(torch.stack(x.split(2)).tanh()), "f32[6, 4]"),
        declines(lambda x, y: [r + 1 for r in torch.stack([*x.split(2), y]).tanh().unbind()], "f32[6, 4]",
                 "f32[2, 4]"),
        declines(lambda x: [r + 1 for r in torch.stack(x.split(2)).tanh().unbind(1)], "f32[6, 4]"),
        declines(lambda x: _write_between(x.split(2), x), "f32[6]", dialects=["torch"], because="in between"),
    ]  # fmt: skip


def _write_between(pieces: Any, x: Any) -> Any:
    stacked = torch.stack(pieces)
    x.add_(1)
    return [row + 1 for row in stacked.tanh().unbind()]


@dataclass(frozen=True)
class MergeStackTanhUnbindPass(Pass):
    """Removes a stack and an unbind around tanh or other pointwise operations: these are applied to the whole value of
    which the stacked values are pieces, and the result is split."""

    name: ClassVar[str] = "merge_stack_tanh_unbind_pass"

    def rules(self) -> Sequence[Rule]:
        return (MergeStackTanhUnbind(),)
