"""Finds operations that can be batched, by list scheduling, in time nearly linear in the size of the graph.

Nodes that are ready at the same time cannot depend on each other. So a node that could be batched is postponed until no
other node is ready; then the largest set of equal postponed nodes is scheduled as a group. Towers of different depth
that are written one after the other line up in this way.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.fx import Node

if TYPE_CHECKING:
    from .recipes import Recipe


@dataclass(frozen=True)
class Member:
    """An operation that could become part of a group."""

    node: Node
    recipe: Recipe
    key: Hashable
    """Equal for operations that can be batched: the operation, its arguments and the facts of its operands."""
    data: tuple[Node, ...]
    """The operands that carry a chain from one group to the next."""
    weights: tuple[Node | None, ...] = ()
    """Weights: operands that differ by member and are stacked for the group."""
    written: bool = False
    """The memory of its result is written in place, so the result cannot be a part of a stack."""

    def on(self, now: Mapping[Node, Node]) -> Member:
        """The member with each operand that is a key of `now` replaced by its value."""
        weights = tuple(None if w is None else now.get(w, w) for w in self.weights)
        return replace(self, data=tuple(now.get(d, d) for d in self.data), weights=weights)


@dataclass(eq=False)
class Group:
    """Operations to batch, in the order in which their results are stacked."""

    members: list[Member]
    feeds: set[Group] = field(default_factory=set)
    """Groups whose stacked result this one takes as it is."""

    @property
    def recipe(self) -> Recipe:
        return self.members[0].recipe

    @property
    def nodes(self) -> list[Node]:
        return [m.node for m in self.members]

    def __len__(self) -> int:
        return len(self.members)


@dataclass
class Plan:
    """A new order of the graph, in which the members of each group are adjacent."""

    order: list[Node]
    groups: list[Group]
    place: dict[Node, tuple[Group, int]]
    """For every member whose result may be read from a stack, its group and its index in that group."""


def find_groups(
    before: dict[Node, list[Node]], member_of: Callable[[Node], Member | None], smallest: int
) -> Plan:
    """Schedules the nodes; `before` lists the nodes that each must come after. Equal members that are ready at the same
    time become a group, if they are at least `smallest`."""
    waits = {node: len(set(earlier)) for node, earlier in before.items()}
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, earlier in before.items():
        for other in set(earlier):
            after[other].append(node)
    ready = deque(node for node, count in waits.items() if count == 0)
    postponed: dict[Hashable, list[Member]] = {}
    largest: list[tuple[int, int, _Unordered]] = []
    plan = Plan([], [], {})

    def go(node: Node) -> None:
        plan.order.append(node)
        for other in after[node]:
            waits[other] -= 1
            if waits[other] == 0:
                ready.append(other)

    while ready or postponed:
        while ready:
            node = ready.popleft()
            member = member_of(node)
            if member is None:
                go(node)
                continue
            waiting = postponed.setdefault(member.key, [])
            waiting.append(member)
            heapq.heappush(largest, (-len(waiting), len(plan.order), _Unordered(member.key)))
        if postponed:
            for group in _parts(_pop_largest(largest, postponed), plan.place, smallest):
                if len(group) >= smallest:
                    plan.groups.append(group)
                    plan.place.update((m.node, (group, i)) for i, m in enumerate(group.members) if not m.written)
                for node in group.nodes:
                    go(node)
    return plan


@dataclass(frozen=True)
class _Unordered:
    """A key in a heap: entries that are otherwise equal come in any order."""

    key: Hashable

    def __lt__(self, other: Any) -> bool:
        return False


def _pop_largest(largest: list[Any], postponed: dict[Hashable, list[Member]]) -> list[Member]:
    while True:
        size, _, entry = heapq.heappop(largest)
        if len(postponed.get(entry.key, ())) == -size:  # else an older, smaller count of the same set
            return postponed.pop(entry.key)


def _parts(members: Sequence[Member], place: dict[Node, tuple[Group, int]], smallest: int) -> Iterable[Group]:
    """Divides equal operations by the origin of their operands: one stack, one value for all, or a value for each."""
    if members[0].recipe.gathers:
        yield Group(list(members))
        return
    uses = Counter((i, operand) for m in members for i, operand in enumerate(m.data))
    parts: dict[Any, list[Member]] = defaultdict(list)
    turn: Counter[Any] = Counter()
    for member in members:
        origin = tuple(_origin(i, operand, place, uses, smallest) for i, operand in enumerate(member.data))
        # the same element of a stack used twice: the second use goes into a second group
        indices = tuple(place[n][1] if n in place else None for n in member.data)
        repetition = turn[origin, indices] if any(t is not None for t in indices) else 0
        turn[origin, indices] += 1
        parts[origin, repetition].append(member)
    for (origin, _), part in parts.items():
        stacked = next((i for i, o in enumerate(origin) if isinstance(o, Group)), None)
        if stacked is not None:
            part.sort(key=lambda m: place[m.data[stacked]][1])
        group = Group(part)
        group.feeds = {o for o in origin if isinstance(o, Group)}
        yield group


def _origin(
    position: int, operand: Node, place: dict[Node, tuple[Group, int]], uses: Counter[Any], smallest: int
) -> Any:
    if operand in place:
        return place[operand][0]
    return operand if uses[position, operand] >= smallest else "a value each"
