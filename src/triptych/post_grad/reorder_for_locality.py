"""`reorder_for_locality`: moves a value next to its first use.

This shortens the lifetimes of values, and puts operations that the code generator can fuse next to each other.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.effects import PURE
from ..ir.facts import fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import MoveEach
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule


def _far(x, y):
    a = x + 1
    b = y * 2
    c = b.sum()
    return c + y, a.relu()


def _far_pieces(x, y):
    first, second = x.split(2)
    b = (y * 2).sum()
    return b + y, first + second


def _over_a_write(x, y):
    a = x + 1
    x.mul_(2)
    b = y * 2
    return b + x, a.relu()


def _over_a_draw(x, y):
    a = torch.rand_like(x)
    b = torch.rand_like(y)
    return b + y, a + x


class MoveDown(Rule):
    """y = f(x); ...; use(y) -> ...; y = f(x); use(y), in inference

    A value never moves over a write of what it reads, over the border of a region, or over a wait.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.is_inference:
            yield from _Walk(program).sites()

    def rewrite(self, op, m):
        return MoveEach(m.bindings["moves"])

    examples = [
        fires(_far, "f32[4]", "f32[4]"),
        fires(_far_pieces, "f32[4]", "f32[4]"),
        declines(_far, "f32[4]", "f32[4]", is_inference=False),
        declines(_over_a_write, "f32[4]", "f32[4]", dialects=("torch",), because="written in between"),
        declines(_over_a_draw, "f32[4]", "f32[4]"),
        declines(lambda x: x.sin().cos(), "f32[4]"),
    ]


@dataclass(frozen=True)
class ReorderForLocality(Pass):
    """In inference, moves a value down to just before its first use; never over a write of what it reads, a
    region's border or a wait. Writes and random draws stay where they are."""

    name = "reorder_for_locality"

    def rules(self) -> Sequence[Rule]:
        return (MoveDown(),)


class _Walk:
    """Visits nodes from the last to the first; a value can move once the walk has reached the earliest of its users.

    The moves take effect in `previous` and `next` only. The graph is rearranged once, at the end.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        """The index of each node in the original order; a node that has moved has the index of its anchor."""
        self.origin = dict(self.place)
        self.previous: dict[Node, Node | None] = {node: self.nodes[i - 1] for i, node in enumerate(self.nodes)}
        self.previous[self.nodes[0]] = None
        self.next = dict(zip(self.nodes, self.nodes[1:]))
        self.moves: list[tuple[list[Node], Node]] = []
        """The units that move, each with the node before which it goes."""
        self.borders: list[int] = []
        self.writes: dict[Node, list[int]] = {}
        aliasing = program.aliasing
        for i, node in enumerate(self.nodes):
            seen = aliasing.effects(node)
            if seen is PURE:
                continue
            if seen.barrier:
                self.borders.append(i)
            for memory in {aliasing.memory(n) for n in seen.writes}:
                self.writes.setdefault(memory, []).append(i)
        self.units: dict[Node, list[Node]] = {}
        self.waiting: dict[Node, int] = {}
        """How many users of each unit the walk has not visited yet."""

    def sites(self) -> Iterator[Match]:
        """What cannot move, each as a site; then everything that moves, as one site."""
        node: Node | None = self.nodes[-1]
        while node is not None:
            yield from self._operands_of(node)
            node = self.previous[node]
        if self.moves:
            covered = [node for unit, _ in self.moves for node in unit]
            leaders = [unit[0] for unit, _ in self.moves]
            yield Match.at(self.program, *leaders, covers=covered, one_each=True, moves=self.moves)

    def _operands_of(self, user: Node) -> Iterator[Match]:
        """Moves the operands to just before their user, in their present order; the walk visits them next."""
        leaders = {_leader(operand) for operand in user.all_input_nodes}
        leaders.discard(_leader(user))
        anchor = user
        for leader in sorted(leaders, key=self.origin.__getitem__, reverse=True):  # none of them has moved so far
            unit = self._unit(leader)
            self.waiting[leader] -= 1
            if user.op == "output":  # moving a value next to the output gains nothing
                continue
            if not self._line_up(unit, anchor):
                if self.waiting[leader] != 0 or not self._may_move(leader):
                    continue
                if (problem := self._obstacle(unit, anchor)) is not None:
                    yield Match.at(self.program, leader, covers=unit, problem=problem)
                    continue
                self._move(unit, anchor)
            anchor = leader

    def _move(self, unit: list[Node], anchor: Node) -> None:
        self.moves.append((unit, anchor))
        for node in unit:
            before, after = self.previous[node], self.next[node]
            self.previous[after] = before
            if before is not None:
                self.next[before] = after
            before = self.previous[anchor]
            assert before is not None  # the node stood before its anchor, and something stood between the two
            self.next[before], self.previous[node] = node, before
            self.next[node], self.previous[anchor] = anchor, node
            self.place[node] = self.place[anchor]

    def _line_up(self, unit: list[Node], anchor: Node) -> bool:
        """Do the nodes of the unit already stand one after the other, directly before the anchor?"""
        return all(self.next[node] is after for node, after in zip(unit, [*unit[1:], anchor]))

    def _unit(self, leader: Node) -> list[Node]:
        """The nodes that move together: a value, or an operation with several results and its `getitem`s."""
        if leader not in self.units:
            unit = [leader]
            if not isinstance(fact(leader), torch.Tensor):
                unit += sorted((u for u in leader.users if _takes_apart(u)), key=self.origin.__getitem__)
            self.units[leader] = unit
            self.waiting[leader] = len({u for n in unit for u in n.users} - set(unit) if unit[1:] else leader.users)
        return self.units[leader]

    def _may_move(self, leader: Node) -> bool:
        if leader.op in ("placeholder", "get_attr") or "unbacked_bindings" in leader.meta or _takes_apart(leader):
            return False
        return self.program.aliasing.effects(leader).pure

    def _obstacle(self, unit: list[Node], anchor: Node) -> Refusal | None:
        """What stands between a unit and the place it would move to; None if nothing does."""
        first, last = self.origin[unit[0]], self.place[anchor]
        if (border := _first_between(self.borders, first, last)) is not None:
            return Refusal("a region begins or ends, or a collective runs, in between", at=self.nodes[border])
        if self.writes:
            aliasing = self.program.aliasing
            memories = {aliasing.memory(n) for n in (*unit, *unit[0].all_input_nodes)}
            writes = [_first_between(self.writes.get(m, ()), first, last) for m in memories]
            if (write := min((place for place in writes if place is not None), default=None)) is not None:
                return Refusal("memory that it reads is written in between, by {at}", at=self.nodes[write])
        return None


def _takes_apart(node: Node) -> bool:
    if node.target is not operator.getitem or node.op != "call_function" or not node.all_input_nodes:
        return False
    return not isinstance(fact(node.all_input_nodes[0]), torch.Tensor)


def _leader(node: Node) -> Node:
    return node.all_input_nodes[0] if _takes_apart(node) else node


def _first_between(places: Sequence[int], first: int, last: int) -> int | None:
    at = bisect_right(places, first)
    return places[at] if at < len(places) and places[at] < last else None
