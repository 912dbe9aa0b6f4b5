"""remove_split_ops_pass: splits that are not needed, because the pieces are concatenated again or only one is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch.fx import Node

from ..ir.program import Program
from ..match.pattern import Int, Tensor
from ..pieces.cat_operands import within_operand
from ..pieces.example_programs import then_write, write_between
from ..pieces.plan import Step, build, plan
from ..pieces.read import Way, way_of
from ..pieces.rule import PutTogether
from ..rewrite.edits import Erase
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.passes import Pass
from ..rewrite.refusal import NotConcerned
from ..rewrite.rule import Match, Rule
from .merge_splits_pass import SplitOfAPiece
from .remove_split_with_size_one_pass import PieceThatIsTheWhole

SPLITTING = frozenset(["split", "unbind"])


class OnePieceUsed(Rule):
    """split(x, sizes)[i] -> x[start:end], and unbind(x)[i] -> select(x, i), where no other piece is used"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, sizes, dim, i: Int):
        return op.split(x, sizes, dim=dim)[i] | op.unbind(x, dim=dim)[i]

    def check(self, m, x):
        used = (u for u in m.nodes[1].users if u.users and u is not m.root.node)
        m.applies(m.root.users and next(used, None) is None, "other pieces are used")
        m.applies(_steps_to_piece(m), "not a piece, or the whole value")
        m.cover(m.nodes[1].users)

    def rewrite(self, op, x, m):
        return build(op, x, _steps_to_piece(m))

    examples = [
        fires(lambda x: x.chunk(2, -1)[1] + 1, "f32[4, 8]"),
        fires(lambda x: x.split([1, 3], 0)[1], "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.unbind(x, 1)[-1] * 2, "f32[4, 8]"),
        fires(lambda x: torch.split(x, [3, x.shape[1] - 3], dim=1)[0] * 2, "f32[4, 8]", dynamic=True),
        fires(lambda x: then_write(x, x.chunk(2)[0]), "f32[4, 8]", dialects=["torch"]),
        declines(lambda x: (lambda a, b: a * b)(*x.chunk(2)), "f32[4, 8]"),
        declines(lambda x: (lambda a, b, c: a * c)(*x.unbind()), "f32[3, 8]"),
    ]


def _steps_to_piece(m: Match) -> list[Step]:
    """The views that take the matched piece from the value that is split; empty if the piece is the whole value, or if
    the root is no piece."""
    way = way_of(m.program, m.root.node, SPLITTING)
    return (plan(way.map) or []) if way is not None and len(way.nodes) == 2 else []


class PieceOfACat(Rule):
    """split(cat([a, b], d), sizes, d)[0] -> a, and unbind(stack([a, b]))[0] -> a; slices and selects likewise"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, sizes, dim, i, start, end, step):
        pieces = op.split(x, sizes, dim=dim)[i] | op.unbind(x, dim=dim)[i]
        return pieces | op.select(x, dim, i) | op.slice(x, dim=dim, start=start, end=end, step=step)

    def check(self, m, x):
        way, _, _ = _piece_of_operand(m)
        m.cover((*way.nodes, way.source))

    def rewrite(self, op, m, x):
        _, operand, steps = _piece_of_operand(m)
        return build(op, m.program.value(operand), steps)

    examples = [
        fires(lambda x, y: [p * 2 for p in torch.cat([x, y]).split([2, 3])], "f32[2, 4]", "f32[3, 4]"),
        fires(lambda x, y: [p * 2 for p in torch.stack([x, y]).unbind()], "f32[4]", "f32[4]"),
        fires(lambda x, y: torch.stack([x, y])[1] * 2, "f32[3, 4]", "f32[3, 4]"),
        fires(lambda x, y: torch.cat([x, y])[3:] * 2, "f32[2, 4]", "f32[3, 4]"),
        fires(lambda x, y: torch.cat([x, y])[:2] * 2, "i64[2, 4]", "i64[3, 4]"),
        fires(lambda x, y: torch.cat([x, y]).split([x.shape[0], y.shape[0]])[1] * 2, "f32[2, 4]", "f32[3, 4]",
              dynamic=True),
        fires(lambda x, y: then_write(torch.cat([x.relu(), y])[:2], y), "f32[2]", "f32[3]", dialects=["torch"]),
        declines(lambda x, y: torch.cat([x, y])[1:4] * 2, "f32[2, 4]", "f32[3, 4]"),
        fires(lambda x, y: torch.cat([x, y], 1)[:, :2] * 2, "f32[3, 2]", "f32[3, 4]"),
        declines(lambda x, y: torch.cat([x.relu(), y], 1)[:, :2], "f32[3, 2]", "f32[3, 4]", because="stride"),
        declines(lambda x, y: torch.cat([x, y])[:2] * 2, "f32[2, 4]", "f64[3, 4]"),
        declines(lambda x, y: torch.cat([x, y])[:2], "f32[2, 4]", "f32[3, 4]", because="leaves the graph"),
        declines(lambda x, y: then_write(torch.cat([x, y])[:2], x), "f32[2, 4]", "f32[3, 4]", dialects=["torch"],
                 because="written"),
        declines(lambda x, y: write_between(torch.cat([x, y]), x, lambda c: c[:2] * 2), "f32[2, 4]", "f32[3, 4]",
                 dialects=["torch"], because="in between"),
    ]  # fmt: skip


def _piece_of_operand(m: Match) -> tuple[Way, Node, list[Step]]:
    """The way from the cat or stack to the piece, the one operand that contains the piece, and the views that take the
    piece from that operand."""
    way = way_of(m.program, m.root.node)
    piece = within_operand(m.program, way.map) if way is not None and way.nodes else None
    steps = plan(piece) if piece is not None else None
    if way is None or piece is None or steps is None:
        raise NotConcerned("not a piece of a single operand")
    return way, piece.source, steps


class CatOfPieces(PutTogether):
    """cat([x[:a], x[a:b], x[b:]]) -> x, a copy of x, or a reshape and permute of x; among others, fewer operands"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])
    whole = True

    examples = lazily(lambda: [
        fires(lambda x: torch.cat(x.chunk(3, -1), dim=1) + 1, "f32[4, 8]"),
        fires(lambda x: torch.concat(x.split([1, 0, 3])) * 2, "i64[4, 8]"),
        fires(lambda x: torch.hstack((x[:, :3], x[:, 3:])).sum(), "f32[4, 8]"),
        fires(lambda x: torch.cat([x.narrow(0, 0, 2), x[2:]]) * 2, "bf16[4, 8]"),
        fires(lambda x: torch.cat(x.split(1, 1), 1) * 2, "f32[4, 3]", dynamic=True),
        fires(lambda x: torch.cat([x[:, :3], x[:, 3:]], 1) * 2, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.cat(x.split([0, 2])) + 1, "f32[2]"),
        fires(lambda x: (lambda a, b: torch.cat([a, b]) + a.sum())(*x.chunk(2)), "f32[4]"),  # used elsewhere
        # into new memory
        fires(lambda x: torch.cat(x.chunk(2)), "f32[4, 8]"),
        fires(lambda x: torch.cat(x.t().chunk(2)) + 1, "f32[4, 8]"),
        fires(lambda x: then_write(torch.cat(x.chunk(2)), x), "f32[4]", dialects=["torch"]),
        fires(lambda x: torch.cat(x.split(2, 1), 1), "f32[4, 6]", dynamic=True),
        fires(lambda x: torch.cat(x.chunk(2, 1), 1),
              torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last)),
        # along another dim, in another order
        fires(lambda x: torch.cat(x.chunk(2, 1), 0) + 1, "f32[4, 8]"),
        fires(lambda x: (lambda a, b, c, d: torch.cat([d, c, b, a]) + 1)(*x.chunk(4)), "f32[4, 2]"),
        # among other operands
        fires(lambda x, y: torch.cat([y, *x.chunk(3, 1), y], dim=-1), "f32[4, 6]", "f32[4, 2]"),
        fires(lambda x, y: torch.cat([*x.chunk(3)[1:], y]), "f32[6]", "f32[2]"),
        fires(lambda x, y: torch.concat([*x.chunk(2), *y.split(1)]), "f32[4]", "f64[3]"),
        fires(lambda x, y: then_write(torch.cat([*x.chunk(2), y]), x), "f32[4]", "f32[2]", dialects=["torch"]),
        fires(lambda e, x, y: torch.cat([e, *x.chunk(2, 1), y], 1), "f32[0]", "f32[4, 6]", "f32[4, 2]"),
        fires(lambda x, y: torch.cat([*x.split(2, 1), y], 1), "f32[4, 6]", "f32[4, 2]", dynamic=True),
        declines(lambda x, y: (lambda a, b, c: (torch.cat([a, b, y]), a * 2, b * 2, c))(*x.chunk(3)),
                 "f32[6]", "f32[2]", because="nothing is saved"),
        declines(lambda x, y: (lambda a, b: torch.cat([a, y, b]))(*x.chunk(2)), "f32[4]", "f32[2]",
                 because="side by side"),
        declines(lambda x: (lambda a, b: (torch.cat([b, a]), a * 2, b * 2))(*x.split([3, 5])), "f32[8]",
                 because="side by side"),
        declines(lambda x, y: write_between(x.chunk(2), x, lambda pieces: torch.cat([*pieces, y])),
                 "f32[4]", "f32[2]", dialects=["torch"], because="in between"),
        declines(lambda x, y: torch.cat([x.chunk(2)[0], y.chunk(2)[0]]), "f32[4]", "f32[4]"),
        declines(lambda x: (lambda a, b, c: torch.cat([a, b]) * 2 + c.sum())(*x.split([1, 1, 2])), "f32[4, 8]"),
        declines(lambda x: torch.cat(x.unbind(1)) + 1, "f32[4, 8]"),
        declines(lambda x, y: torch.cat([x, y]), "f32[4]", "f32[4]"),
    ])  # fmt: skip


class UnusedPieces(Rule):
    """split(x, sizes), whose pieces nothing uses -> nothing"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in reversed(list(program.graph.nodes)):
            whole = node.args[0] if node.target is getitem else node
            if not node.users and _takes_apart(program, whole):
                yield Match.at(program, node)

    def rewrite(self, op, m):
        return Erase([m.root.node])

    examples = [
        fires(lambda x: (x.chunk(2), x + 1)[1], "f32[4, 8]", dialects=["aten"]),
        declines(lambda x: x.chunk(2)[0] + 1, "f32[4, 8]", dialects=["torch"]),
    ]


def _takes_apart(program: Program, node: Any) -> bool:
    call = program.call(node) if isinstance(node, Node) else None
    return call is not None and call.op in SPLITTING and not call.mutates


RULES: Sequence[Rule] = (
    SplitOfAPiece(),
    PieceThatIsTheWhole(),
    PieceOfACat(),
    OnePieceUsed(),
    CatOfPieces(),
    UnusedPieces(),  # last: for pieces that the other rules have left without users
)


@dataclass(frozen=True)
class RemoveSplitOpsPass(Pass):
    """Removes splits that nothing needs: their pieces are unused, one piece is the whole value or the only one used,
    the pieces are concatenated again, or a piece is split again."""

    name: ClassVar[str] = "remove_split_ops_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
