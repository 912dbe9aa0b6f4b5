"""Which collectives are joined, and the nodes that join them: by concatenation or by the coalesced operator."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    bytes_moved,
    collectives,
    operator_of,
    wait_operator,
)
from ..ir.facts import difference, fact, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..rewrite.edits import Edit, Erase, Move, ReadInstead, Together
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .placement import Order, Placement

aten = torch.ops.aten

MEGABYTE = 2**20
CONCATENATION, COALESCED = "concatenation", "coalesced"
WAYS = (CONCATENATION, COALESCED)


def problem_of(program: Program, collective: Collective) -> Refusal | None:
    """Why a collective cannot be joined with others, whichever they are."""
    wait = collective.wait
    if wait is None:
        return Refusal("the result of {at} has other uses than one wait", at=collective.node)
    writer = next((w for w in program.aliasing.writers(collective.operands[0]) if w < wait), None)
    if writer is not None:  # the joined collective may start on the other side of the write
        return Refusal("the operand is written before the wait, by {at}", at=writer)
    tensors = [tensor_fact(collective.operands[0]), tensor_fact(collective.node)]
    if any(t is None or t.layout is not torch.strided for t in tensors):
        return Refusal("shape and dtype are not known", at=collective.node)
    sizes = [bytes_moved(t) for t in tensors]
    if None in sizes:
        return Refusal("sizes are symbolic, so ranks could decide differently", at=collective.node)
    if 0 in sizes:
        return Refusal("nothing is communicated", at=collective.node)
    if not tensor_of(collective.node).is_contiguous():
        return Refusal("the result is not contiguous", at=collective.node)
    return None


@dataclass
class _Open:
    """A bucket that still takes members."""

    members: list[Collective] = field(default_factory=list)
    size: int = 0
    behind: set[Node] = field(default_factory=set)
    """The nodes that depend on the result of a member."""


def buckets(program: Program, members: Iterable[Collective], limit: int) -> list[tuple[Collective, ...]]:
    """Divides similar collectives, in the order of the graph, into buckets of up to `limit` bytes. No member of a
    bucket depends on the result of another. A collective that is larger than the limit gets its own bucket."""
    wanted = {member.node: member for member in members}
    order = Order(program)
    bucket = _Open()
    closed: list[_Open] = []
    for node in order.nodes:
        if any(n in bucket.behind for n in order.before[node]):
            bucket.behind.add(node)
        if (member := wanted.get(node)) is None:
            continue
        size = _bytes(member)
        if bucket.members and (node in bucket.behind or bucket.size + size > limit):
            closed.append(bucket)
            bucket = _Open()
        bucket.members.append(member)
        bucket.size += size
        bucket.behind.update(member.waits)
    return [tuple(b.members) for b in (*closed, bucket) if b.members]


def likes(
    program: Program, kind: str, wanted: Callable[[Collective], Refusal | None]
) -> Iterator[tuple[list[Collective], list[tuple[Collective, Refusal]]]]:
    """Groups of collectives of one kind that differ only in their data: those that can be joined, and the others."""
    groups: dict[Any, list[Collective]] = {}
    for member in collectives(program.graph):
        if member.kind == kind and not member.is_coalesced:
            groups.setdefault(member.like(), []).append(member)
    for group in groups.values():
        refused = [(c, p) for c in group if (p := problem_of(program, c) or wanted(c)) is not None]
        names = {c.node for c, _ in refused}
        yield [c for c in group if c.node not in names], refused


def _bytes(member: Collective) -> int:
    """How many bytes a member adds to its bucket: those of its operand or its result, whichever is larger."""
    return max(bytes_moved(tensor_of(n)) or 0 for n in (member.operands[0], member.node))


def join(
    op: Emitter, program: Program, members: Sequence[Collective], place: Placement, way: str
) -> Edit:
    """Emit one collective for several, and return the edit that replaces these."""
    early, late = op.at(place.launch), op.at(place.wait)
    joined = _coalesced if way == COALESCED else _CONCATENATED[members[0].kind]
    results = joined(early, late, program, members)
    # operands first, then what was emitted for them
    moved = [*place.before_launch, *early.made] if place.before_launch else []
    edits: list[Edit] = [Move(node, place.launch) for node in moved]
    for member, result in zip(members, results):
        wait = member.wait
        assert wait is not None  # `problem_of` has checked
        if problem := difference(fact(wait), fact(result.node)):
            raise Refused(problem.blaming(wait))
        edits.append(ReadInstead(wait, result.node, tuple(wait.users)))
    edits += [Move(node, place.wait) for node in place.after_wait]
    edits.append(Erase([m.wait for m in members if m.wait is not None]))
    edits.append(Erase([m.node for m in members]))
    return Together(edits)


def _coalesced(early: Emitter, late: Emitter, program: Program, members: Sequence[Collective]) -> list[Value]:
    first = members[0]
    started = early.call(operator_of(first.kind, coalesced=True), [m.operands[0] for m in members], *_settings(first))
    parts = [early.call(operator.getitem, started, i) for i in range(len(members))]
    return [late.call(wait_operator(), part) for part in parts]


def _all_reduced(early: Emitter, late: Emitter, program: Program, members: Sequence[Collective]) -> list[Value]:
    flat = early.cat([early.reshape(m.operands[0], [-1]) for m in members], 0)
    return _pieces(late, program, members, _communicated(early, late, members[0], flat), 0)


def _gathered(early: Emitter, late: Emitter, program: Program, members: Sequence[Collective]) -> list[Value]:
    flat = early.cat([early.reshape(m.operands[0], [-1]) for m in members], 0)
    everything = _communicated(early, late, members[0], flat)
    # one row for each rank, and in it the members one after the other
    return _pieces(late, program, members, late.reshape(everything, [members[0].ranks, -1]), 1)


def _scattered(early: Emitter, late: Emitter, program: Program, members: Sequence[Collective]) -> list[Value]:
    # one row for each rank that a part goes to
    rows = early.cat([early.reshape(m.operands[0], [m.ranks, -1]) for m in members], 1)
    return _pieces(late, program, members, _communicated(early, late, members[0], early.reshape(rows, [-1])), 0)


_CONCATENATED = {ALL_REDUCE: _all_reduced, ALL_GATHER: _gathered, REDUCE_SCATTER: _scattered}


def _settings(collective: Collective) -> list[Any]:
    """The arguments of the operator after its operand."""
    settings = (collective.reduction or None, collective.ranks, collective.group)
    return [s for s in settings if s is not None]


def _communicated(early: Emitter, late: Emitter, first: Collective, flat: Value) -> Value:
    started = early.call(operator_of(first.kind), flat, *_settings(first))
    return late.call(wait_operator(), started)


def _pieces(
    late: Emitter, program: Program, members: Sequence[Collective], whole: Value, dim: int
) -> list[Value]:
    """The result of each member, taken from that of the bucket."""
    shapes = [list(tensor_of(m.node).shape) for m in members]
    ranks = (members[0].ranks or 1) if dim else 1
    sizes = [tensor_of(m.node).numel() // ranks for m in members]
    parts = late.call(aten.split_with_sizes.default, whole, sizes, dim)
    results = []
    for i, (member, shape) in enumerate(zip(members, shapes)):
        piece = late.reshape(late.call(operator.getitem, parts, i), shape)
        wait = member.wait
        shared = wait is not None and (program.aliasing.is_output(wait) or program.aliasing.written(wait))
        # results that leave the graph, or are written in place, get separate memory, as before
        results.append(late.clone(piece) if shared and program.aliasing.same(piece.node, whole.node) else piece)
    return results
