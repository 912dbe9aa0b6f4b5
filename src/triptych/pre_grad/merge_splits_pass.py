"""merge_splits_pass: merges a split with the splits of its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, ClassVar

from torch.fx import Node

from ..ir.facts import fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule


@dataclass(eq=False)
class _Tree:
    """A split with the splits of its pieces, and recursively the splits of their pieces, all along one dim."""

    source: Node
    dim: int
    sizes: list[Any] = field(default_factory=list)
    pieces: list[tuple[Node, int]] = field(default_factory=list)
    """Each piece that is used, with its index in `sizes`."""
    inner: list[Node] = field(default_factory=list)
    """All splits except the outermost, each preceded by the piece that it splits."""


def split_along(program: Program, node: Any) -> int | None:
    """The dim along which a node splits; None if it does not."""
    call = program.call(node) if isinstance(node, Node) else None
    return call.get("dim") if call is not None and call.op == "split" and not call.mutates else None


def _elements(split: Node) -> Iterator[tuple[Any, list[Node]]]:
    """For each piece of a split, its fact and the getitem nodes that take it."""
    parts = fact(split)
    holders: dict[int, list[Node]] = {}
    for user in split.users:
        number: Any = user.args[1]
        holders.setdefault(number % len(parts), []).append(user)
    return ((part, holders.get(i, [])) for i, part in enumerate(parts))


def _is_taken_apart(split: Node) -> bool:
    """Is every user a getitem of one piece, so that nothing needs the tuple itself?"""
    return fact(split) is not None and all(
        u.target is getitem and isinstance(u.args[1], int) for u in split.users
    )


def _tree(program: Program, outer: Node, dim: int) -> _Tree:
    tree = _Tree(program.call(outer).args["self"], dim)  # type: ignore[union-attr]
    work = [_elements(outer)]
    while work:
        element = next(work[-1], None)
        if element is None:
            work.pop()
            continue
        part, holders = element
        inner = next(iter(holders[0].users), None) if len(holders) == 1 and len(holders[0].users) == 1 else None
        if inner is not None and split_along(program, inner) == dim and _is_taken_apart(inner):
            if program.aliasing.barrier_between(outer, inner) is None:
                tree.inner += [holders[0], inner]
                work.append(_elements(inner))
                continue
        tree.pieces += [(h, len(tree.sizes)) for h in holders]
        tree.sizes.append(part.shape[dim])
    return tree


def _why_apart(program: Program, inner: Node, dim: int) -> Refusal | None:
    """Why a split of a piece was not merged with the split that the piece comes from; None if there is no reason to
    report."""
    piece = program.call(inner).args["self"]  # type: ignore[union-attr]
    if not isinstance(piece, Node) or piece.target is not getitem or split_along(program, piece.args[0]) != dim:
        return None
    if len(piece.users) > 1:
        other = next(u for u in piece.users if u is not inner)
        return Refusal("{at} is used elsewhere, by {found}", at=piece, found=other)
    barrier = program.aliasing.barrier_between(piece.args[0], inner)  # type: ignore[arg-type]
    return Refusal("{at} stands between the splits", at=barrier) if barrier is not None else None


class SplitOfAPiece(Rule):
    """split(split(x, sizes)[i], more, dim) -> pieces of one split of x, for a whole tree of splits along one dim"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in list(program.graph.nodes):
            if node._erased or (dim := split_along(program, node)) is None or not _is_taken_apart(node):
                continue
            tree = _tree(program, node, dim)
            if tree.inner and tree.pieces:
                pieces = [piece for piece, _ in tree.pieces]
                yield Match.at(program, *pieces, covers=[node, *tree.inner], before=node, tree=tree)
            elif reason := _why_apart(program, node, dim):
                yield Match.at(program, node, problem=reason)

    def rewrite(self, op, tree):
        split = op.split(tree.source, tree.sizes, dim=tree.dim)
        return tuple(op.getitem(split, number) for _, number in tree.pieces)

    examples = [
        fires(lambda x: (lambda a, b: (a + 1, [c * 2 for c in b.chunk(2, 1)]))(*x.split([2, 6], 1)),
              "f32[4, 8]"),
        fires(lambda x: [b.split([1, 1]) for b in x.chunk(2)][1][0] * 2, "f32[4, 8]", dialects=["torch"]),
        fires(lambda x: [c + 1 for c in x.split([2, 2])[1].chunk(2)], "f32[4, 8]", dynamic=True),
        fires(lambda x: [c + 1 for b in x.split([2, 6], -1)[1:] for p in b.split(3, 1) for c in p.tensor_split(3, 1)],
              "f32[4, 8]"),
        fires(lambda x: [c.add_(1) for c in x.chunk(2)[1].chunk(2)][0] + x[3], "f32[4, 8]", dialects=["torch"]),
        declines(lambda x: (lambda a, b: (a * 2, b * 2, *b.chunk(2, 1)))(*x.chunk(2, 1)), "f32[4, 8]",
                 because="used elsewhere"),
        declines(lambda x: (lambda a, b: (a * 2, *[c * 2 for c in b.chunk(2)]))(*x.chunk(2, 1)), "f32[4, 8]"),
        declines(lambda x: [a * 2 for a in x.chunk(2)], "f32[4, 8]"),
    ]  # fmt: skip


@dataclass(frozen=True)
class MergeSplitsPass(Pass):
    """Merges a split and the splits of its pieces along the same dim into one split."""

    name: ClassVar[str] = "merge_splits_pass"

    def rules(self) -> Sequence[Rule]:
        return (SplitOfAPiece(),)
