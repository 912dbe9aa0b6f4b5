"""Pieces of values: which part of which value a node is, and which of them lie side by side.

`split`, `unbind`, slices and selects all take a value apart along one dim; `cat` and `stack` put pieces
together. What is put together in the order in which it was taken apart is a part of the value itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import fact, known_equal, same_layout, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.rule import Match


@dataclass(frozen=True)
class Piece:
    """`source[start:end]` along a dim; or, with `single`, `source[start]`, which has that dim no more."""

    source: Node
    dim: int
    start: Any
    end: Any
    single: bool
    nodes: tuple[Node, ...]
    """What makes the piece, itself first."""


def piece_of(program: Program, node: Node) -> Piece | None:
    """The part of another value that this node is, if it is one."""
    call = program.call(node)
    if call is None:
        return None
    operand = call.args.get("self")
    if not isinstance(operand, Node):
        return None
    if call.op == "getitem":
        return _taken_from(program, node, operand, call.args["index"])
    source = tensor_fact(operand)
    if source is None or call.op not in ("slice", "select"):
        return None
    dim = call.get("dim")
    if call.op == "select":
        index = call.args["index"]
        return Piece(operand, dim, index, index + 1, True, (node,)) if isinstance(index, int) else None
    start, end = call.get("start"), call.get("end")
    if call.get("step") != 1 or not isinstance(start, int) or not isinstance(end, (int, type(None))):
        return None
    if start < 0 or (end is not None and not _is_inside(end, source.shape[dim])):
        return None
    return Piece(operand, dim, start, source.shape[dim] if end is None else end, False, (node,))


def _is_inside(end: int, size: Any) -> bool:
    return isinstance(size, int) and 0 <= end <= size


def _taken_from(program: Program, node: Node, whole: Node, index: Any) -> Piece | None:
    """An element of a split or an unbind."""
    call, parts = program.call(whole), fact(whole)
    if call is None or call.op not in ("split", "unbind") or not isinstance(index, int) or parts is None:
        return None
    source, dim, index = call.args["self"], call.get("dim"), index % len(parts)
    if call.op == "unbind":
        return Piece(source, dim, index, index + 1, True, (node, whole))
    sizes = [part.shape[dim] for part in parts]
    start = sum(sizes[:index])
    return Piece(source, dim, start, start + sizes[index], False, (node, whole))


@dataclass(frozen=True)
class Run:
    """Pieces of one value that lie side by side, in order."""

    pieces: tuple[Piece, ...]

    @property
    def source(self) -> Node:
        return self.pieces[0].source

    @property
    def dim(self) -> int:
        return self.pieces[0].dim

    @property
    def single(self) -> bool:
        return self.pieces[0].single

    @property
    def whole(self) -> bool:
        known = tensor_fact(self.source)
        if known is None:
            return False
        start, end = self.pieces[0].start, self.pieces[-1].end
        return known_equal(start, 0) and known_equal(end, known.shape[self.dim])

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(dict.fromkeys(n for p in self.pieces for n in p.nodes))

    def takes(self, piece: Piece) -> bool:
        last = self.pieces[-1]
        alike = (last.source, last.dim, last.single) == (piece.source, piece.dim, piece.single)
        return alike and known_equal(last.end, piece.start)

    def build(self, op: Emitter) -> Any:
        """The part of the source that the pieces make up, in the source's shape but for the dim."""
        if self.whole:
            return self.source
        return op.slice(self.source, self.dim, self.pieces[0].start, self.pieces[-1].end)


def runs(pieces: Iterable[Piece | None]) -> list[Run | None]:
    """Neighbours that lie side by side in their source put together; None where there is no piece."""
    found: list[Run | None] = []
    for piece in pieces:
        last = found[-1] if found else None
        if piece is not None and last is not None and last.takes(piece):
            found[-1] = Run((*last.pieces, piece))
        else:
            found.append(None if piece is None else Run((piece,)))
    return found


def operand_pieces(program: Program, operands: Any) -> list[Piece | None]:
    """For each operand of a `cat` or a `stack`, as a rule captured them, the piece that it is."""
    if not isinstance(operands, (list, tuple)):
        return []
    return [piece_of(program, o.node) for o in operands]


def only_used_by(nodes: Iterable[Node], users: Sequence[Node]) -> list[Node]:
    """The nodes that nobody needs once those users go; a split goes with the last of its pieces."""
    gone: set[Node] = set(users)
    for node in sorted(nodes, reverse=True):
        if all(user in gone for user in node.users):
            gone.add(node)
    return [n for n in gone if n not in users]


def copied(op: Emitter, value: Any, like: torch.Tensor | None) -> Any:
    """The value in new memory, laid out as `cat` and `stack` do it: as the operands lie, or contiguous."""
    known = tensor_fact(getattr(value, "node", value))
    if known is not None and like is not None and same_layout(known, like):
        return op.clone(value)
    return op.clone(value, memory_format=torch.contiguous_format)


def take_up(m: Match, joins: Sequence[Value], own: Sequence[Value]) -> None:
    """Let the operands of inner joins go into the outer one: of those nobody else uses, and that are not cast."""
    m.require(own, f"{joins[0].node.name} is used elsewhere, and would be made all the same")
    same = [t for t in own if t.dtype is not None and t.dtype == m.root.dtype]
    m.require(same, f"{own[0].dtype} is converted to {m.root.dtype} on the way")
    m.cover(t.node for t in same)
