"""remove_split_ops_pass: values taken apart for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch.fx import Node

from ..ir.facts import fact
from ..match.pattern import Int, Tensor
from ..passes.base import Pass, PassRun
from ..rewrite.emit import Emitter
from ..rewrite.rule import Match, Rule
from ..testing import declines, fires
from .pieces import Piece, Run, copied, only_used_by, operand_pieces, piece_of, runs


class PieceThatIsTheWhole(Rule):
    """split(x, [all of it])[0] -> x"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, sizes, dim, i: Int):
        return op.split(x, sizes, dim=dim)[i]

    def check(self, m, x):
        piece = piece_of(m.program, m.root.node)
        m.applies(piece is not None and Run((piece,)).whole, "a part of the value")

    def rewrite(self, op, x):
        return x

    examples = [
        fires(lambda x: x.chunk(1)[0] + 1, "f32[4, 8]"),
        fires(lambda x: torch.split(x, 8, dim=-1)[0] + 1, "f32[4, 8]"),
        fires(lambda x: x.split([8, 0], 1)[0] + 1, "f32[4, 8]"),
        fires(lambda x: x.chunk(1, 1)[0] + 1, "f32[4, 8]", dynamic=True),
        fires(lambda x: write(x.chunk(1)[0], x), "f32[4, 8]"),  # one memory before and after
        declines(lambda x: x.chunk(2)[0] + 1, "f32[4, 8]"),
        declines(lambda x: x.chunk(1)[0], "f32[4, 8]", because="very tensor"),
    ]


class OnePieceUsed(Rule):
    """split(x, sizes)[i] -> x[start:end], and unbind(x)[i] -> select(x, i), where no other piece is used"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, sizes, dim, i: Int):
        return op.split(x, sizes, dim=dim)[i] | op.unbind(x, dim=dim)[i]

    def check(self, m, x):
        piece = piece_of(m.program, m.root.node)
        m.applies(piece is not None and (piece.single or not Run((piece,)).whole), "no piece, or all of it")
        others = [u for u in piece.nodes[1].users if u is not m.root.node]
        m.applies(m.root.users and not any(u.users for u in others), "other pieces are used")
        m.cover((*others, *piece.nodes))

    def rewrite(self, op, x, m):
        piece = piece_of(m.program, m.root.node)
        if piece.single:
            return op.select(x, piece.dim, piece.start)
        return op.slice(x, piece.dim, piece.start, piece.end)

    examples = [
        fires(lambda x: x.chunk(2, -1)[1] + 1, "f32[4, 8]"),
        fires(lambda x: x.split([1, 3], 0)[1], "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.unbind(x, 1)[-1] * 2, "f32[4, 8]"),
        fires(lambda x: torch.split(x, [3, x.shape[1] - 3], dim=1)[0] * 2, "f32[4, 8]", dynamic=True),
        fires(lambda x: write(x, x.chunk(2)[0]), "f32[4, 8]", dialects=["torch"]),
        declines(lambda x: (lambda a, b: a * b)(*x.chunk(2)), "f32[4, 8]"),
        declines(lambda x: (lambda a, b, c: a * c)(*x.unbind()), "f32[3, 8]"),
    ]


class CatOfPieces(Rule):
    """cat of x[a:b], x[b:c], ... -> x[a:c], which is x where nothing is left out"""

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim)

    def check(self, m, tensors, dim):
        _only_run(m, tensors, dim)

    def rewrite(self, op, tensors, dim, m):
        return _only_run(m, tensors, dim).build(op)

    examples = [
        fires(lambda x: torch.cat(x.chunk(3, -1), dim=1) + 1, "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: torch.cat(x.chunk(3, -1), dim=1) + 1, "f32[4, 8]", dialects=["aten"]),
        fires(lambda x: torch.concat(x.split([1, 0, 3])) * 2, "i64[4, 8]"),
        fires(lambda x: torch.hstack((x[:, :3], x[:, 3:])).sum(), "f32[4, 8]"),
        fires(lambda x: torch.cat([x.narrow(0, 0, 2), x[2:]]) * 2, "bf16[4, 8]"),
        fires(lambda x: (lambda a, b, c: torch.cat([a, b]) * 2 + c.sum())(*x.split([1, 1, 2])), "f32[4, 8]"),
        fires(lambda x: torch.cat(x.split(1, 1), 1) * 2, "f32[4, 3]", dynamic=True),
        fires(lambda x: torch.cat(x.chunk(2)) + 1, "f32[0]"),
        fires(lambda x: (lambda a, b: torch.cat([a, b]) + a.sum())(*x.chunk(2)), "f32[4]"),  # used elsewhere
        declines(lambda x: torch.cat(x.chunk(2)), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: torch.cat(x.t().chunk(2)) + 1, "f32[4, 8]", because="stride"),
        declines(lambda x: torch.cat(x.chunk(3, 1)[1:], 1) + 1, "f32[4, 6]", because="stride"),
        declines(lambda x: (lambda a, b: torch.cat([b, a]) + 1)(*x.chunk(2)), "f32[4, 8]", because="order"),
        declines(lambda x: (lambda a, b, c: torch.cat([a, c]) + 1)(*x.chunk(3)), "f32[6]", because="order"),
        declines(lambda x: torch.cat(x.chunk(2, 1), 0) + 1, "f32[4, 8]"),
        declines(lambda x: write(torch.cat(x.chunk(2)), x), "f32[4]", dialects=["torch"], because="written"),
        declines(lambda x, y: torch.cat([*x.chunk(2), y]) + 1, "f32[4]", "f32[2]"),
        declines(lambda x: torch.cat([x[::2], x[1::2]]) + 1, "f32[4]"),
    ]


class CopyOfPieces(Rule):
    """cat of x[a:b], x[b:c], ... -> a copy of x[a:c], where it must be memory of its own"""

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim)

    def check(self, m, tensors, dim):
        _only_run(m, tensors, dim, m.applies)

    def rewrite(self, op, tensors, dim, m):
        return copied(op, _only_run(m, tensors, dim).build(op), m.root.tensor)

    examples = [
        fires(lambda x: torch.cat(x.chunk(2)), "f32[4, 8]"),
        fires(lambda x: torch.cat(x.t().chunk(2)) + 1, "f32[4, 8]"),
        fires(lambda x: write(torch.cat(x.chunk(2)), x), "f32[4]", dialects=["torch"]),
        fires(lambda x: (lambda a, b, c: (torch.cat([a, b], 1), c.sum()))(*x.chunk(3, 1)), "f32[4, 6]"),
        fires(lambda x: torch.cat(x.split(2, 1), 1), "f32[4, 6]", dynamic=True),
        declines(lambda x: (lambda a, b: torch.cat([b, a]))(*x.chunk(2)), "f32[4, 8]"),
        fires(lambda x: torch.cat(x.chunk(2, 1), 1),
              torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last)),
        declines(lambda x, y: (lambda a, b: torch.cat([a, y, b]))(*x.chunk(2)), "f32[4]", "f32[4]"),
    ]  # fmt: skip


class PiecesAmongOthers(Rule):
    """cat([y, x[a:b], x[b:c], z]) -> cat([y, x[a:c], z]), where that is fewer operations"""

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim)

    def check(self, m, tensors, dim):
        pieces = operand_pieces(m.program, tensors)
        found = _runs_along(pieces, dim)
        several = [r for r in found if r is not None and len(r.pieces) > 1]
        m.applies(several and len(found) > 1, "no neighbouring pieces of one value")
        saved = only_used_by((n for r in several for n in r.nodes), [m.root.node])
        added = sum(not r.whole for r in several)
        m.require(len(saved) > added, "the pieces are used elsewhere: nothing is saved")
        m.cover(saved)

    def rewrite(self, op, tensors, dim, m):
        found = _runs_along(operand_pieces(m.program, tensors), dim)
        operands, at = [], 0
        for run in found:
            operands.append(run.build(op) if run is not None and len(run.pieces) > 1 else tensors[at])
            at += 1 if run is None else len(run.pieces)
        return op.cat(operands, dim=dim)

    examples = [
        fires(lambda x, y: torch.cat([y, *x.chunk(3, 1), y], dim=-1), "f32[4, 6]", "f32[4, 2]"),
        fires(lambda x, y: torch.cat([*x.chunk(3)[1:], y]), "f32[6]", "f32[2]"),
        fires(lambda x, y: torch.concat([*x.chunk(2), *y.split(1)]), "f32[4]", "f64[3]"),
        fires(lambda x, y: write(torch.cat([*x.chunk(2), y]), x), "f32[4]", "f32[2]", dialects=["torch"]),
        fires(lambda e, x, y: torch.cat([e, *x.chunk(2, 1), y], 1), "f32[0]", "f32[4, 6]", "f32[4, 2]"),
        fires(lambda x, y: torch.cat([*x.split(2, 1), y], 1), "f32[4, 6]", "f32[4, 2]", dynamic=True),
        declines(lambda x, y: (lambda a, b, c: (torch.cat([a, b, y]), a * 2, b * 2, c))(*x.chunk(3)),
                 "f32[6]", "f32[2]", because="nothing is saved"),
        declines(lambda x, y: (lambda a, b: torch.cat([a, y, b]))(*x.chunk(2)), "f32[4]", "f32[2]"),
        declines(lambda x, y: write_between(x.chunk(2), x, y), "f32[4]", "f32[2]", dialects=["torch"],
                 because="in between"),
    ]  # fmt: skip


def _runs_along(pieces: Sequence[Any], dim: Any) -> list[Run | None]:
    """Runs of pieces that were taken along the dim on which they are put together."""
    return runs(p if p is not None and not p.single and p.dim == dim else None for p in pieces)


def _only_run(m: Match, tensors: Any, dim: Any, in_order: Callable[[Any, str], None] | None = None) -> Run:
    """The run that all operands of a cat are; the site is left alone if they are none."""
    pieces = operand_pieces(m.program, tensors)
    along = [p for p in pieces if p is not None and not p.single and p.dim == dim]
    m.applies(len(pieces) > 1 and len(along) == len(pieces), "no pieces")
    m.applies(len({p.source for p in along}) == 1, "pieces of several values")
    found = _runs_along(pieces, dim)
    (in_order or m.require)(len(found) == 1, "the pieces are not side by side in this order")
    (run,) = found
    assert run is not None
    m.cover(only_used_by(run.nodes, [m.root.node]))
    return run


def write(x: Any, y: Any) -> Any:
    """For examples: a write that the first value must see if it shares the second's memory, and only then."""
    y.add_(1)
    return x * 2


def write_between(pieces: Any, x: Any, y: Any) -> Any:
    x.add_(1)
    return torch.cat([*pieces, y])


RULES: Sequence[Rule] = (
    PieceThatIsTheWhole(), OnePieceUsed(), CatOfPieces(), CopyOfPieces(), PiecesAmongOthers(),
)  # fmt: skip


@dataclass(frozen=True)
class RemoveSplitOpsPass(Pass):
    """Splits that nobody needs: unused pieces, one piece that is the whole or the only one used, pieces put
    together again in order, a split of a piece of a split."""

    name: ClassVar[str] = "remove_split_ops_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES

    def run(self, run: PassRun) -> None:
        for node in list(run.program.graph.nodes):
            self._split_of_a_piece(run, node)
        run.run_rules(self.rules())
        for node in reversed(list(run.program.graph.nodes)):
            self._unused(run, node)

    def _unused(self, run: PassRun, node: Node) -> None:
        if node.users or run.spent or not _takes_apart(run, node.args[0] if node.target is getitem else node):
            return
        run.rewriter.erase(node)
        run.fired("unused_pieces")

    def _split_of_a_piece(self, run: PassRun, inner: Node) -> None:
        """split(split(x, [a, b])[1], [c, d]) -> pieces of split(x, [a, c, d])"""
        call = run.program.call(inner)
        piece = piece_of(run.program, call.args["self"]) if call is not None and call.op == "split" else None
        if call is None or piece is None or (piece.dim, piece.single) != (call.get("dim"), False):
            return
        between, outer = piece.nodes[0], piece.nodes[-1]
        if not _takes_apart(run, outer):
            return
        users = [u for u in (*outer.users, *inner.users) if u is not between]
        what = "split_of_a_piece"
        if list(between.users) != [inner]:
            run.declined(what, inner, f"{between.name} is used elsewhere")
        elif barrier := run.program.aliasing.barrier_between(outer, inner):
            run.declined(what, inner, f"{barrier.name} stands between the splits")
        elif users and all(piece_of(run.program, u) is not None for u in users):
            make = _one_split(piece, inner, users)
            run.replace(what, users, make, before=outer, covered=(between, outer, inner))

    examples = [
        fires(lambda x: (lambda a, b: (a + 1, [c * 2 for c in b.chunk(2, 1)]))(*x.split([2, 6], 1)),
              "f32[4, 8]"),
        fires(lambda x: [b.split([1, 1]) for b in x.chunk(2)][1][0] * 2, "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: [c + 1 for c in x.split([2, 2])[1].chunk(2)], "f32[4, 8]", dynamic=True),
        fires(lambda x: (x.chunk(2), x + 1)[1], "f32[4, 8]", dialects=["aten"]),
        declines(lambda x: (lambda a, b: (a * 2, b * 2, *b.chunk(2, 1)))(*x.chunk(2, 1)), "f32[4, 8]",
                 because="used elsewhere"),
        declines(lambda x: (lambda a, b: (a * 2, *[c * 2 for c in b.chunk(2)]))(*x.chunk(2, 1)), "f32[4, 8]"),
        declines(lambda x: [a * 2 for a in x.chunk(2)], "f32[4, 8]"),
    ]  # fmt: skip


def _one_split(piece: Piece, inner: Node, users: Sequence[Node]) -> Callable[[Emitter], list[Any]]:
    """What makes all pieces of two splits, the second of which takes a piece of the first apart."""
    between, outer = piece.nodes
    at = _number_of(between)
    first, second = ([part.shape[piece.dim] for part in fact(n)] for n in (outer, inner))

    def place(user: Node) -> int:
        if user.args[0] is inner:
            return at + _number_of(user)
        return _number_of(user) + (0 if _number_of(user) < at else len(second) - 1)

    def make(op: Emitter) -> list[Any]:
        split = op.split(piece.source, [*first[:at], *second, *first[at + 1 :]], dim=piece.dim)
        return [op.getitem(split, place(u)) for u in users]

    return make


def _number_of(element: Any) -> int:
    """Which of the pieces of its split a node is."""
    whole, index = element.args
    return index % len(fact(whole))


def _takes_apart(run: PassRun, node: Any) -> bool:
    call = run.program.call(node) if isinstance(node, Node) else None
    return call is not None and call.op in ("split", "unbind") and not call.mutates
