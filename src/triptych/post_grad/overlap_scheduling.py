"""`overlap_scheduling`: starts collectives early and waits for them late, so that computation overlaps with them.

Collectives keep their order among themselves, and their positions depend only on the graph and on the sizes of the
tensors that are communicated, so every rank arrives at the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..communication.buckets import MEGABYTE
from ..communication.example_group import all_gather, all_reduce, wait
from ..communication.placement import Order, after
from ..communication.timing import Clock, latest_starts
from ..cost import Waiting, Work
from ..ir.collectives import Collective, bytes_moved, collectives, is_wait
from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..ir.readers import readers
from ..ir.traits import is_pointwise, is_view
from ..rewrite.edits import Move, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
LAYERS = ("f32[4, 8]", "f32[4, 8]", "f32[4, 8]")
IN_FLIGHT = 512.0
"""The default limit, in megabytes: less than one percent of the memory of a large GPU."""


def _two_layers(x: Any, first: Any, second: Any) -> Any:
    y = (x @ wait(all_gather(first)).t()).relu()
    return y @ wait(all_gather(second))


def _reduced_early(x: Any, y: Any) -> Any:
    whole = wait(all_reduce(x)).view(-1)
    z = y.exp().sin()
    return whole.sum() + z


def _nothing_between(x: Any) -> Any:
    return wait(all_reduce(x)) + 1


class WaitLate(Rule):
    """w = wait(x); f(y); use(w) -> f(y); w = wait(x); use(w)

    Views of the result move with it.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        waits = [node for node in program.graph.nodes if is_wait(node)]
        order = Order(program)
        users: dict[Node, list[Node]] = {}
        for node in order.nodes:
            for earlier in order.before[node]:
                users.setdefault(earlier, []).append(node)
        for wait_node in reversed(waits):
            unit, anchor = self._unit(program, wait_node, users)
            if anchor is not None and _others_between(unit[0], anchor, unit):
                yield Match.at(program, wait_node, unit=unit, anchor=anchor)

    def _unit(
        self, program: Program, wait_node: Node, users: dict[Node, list[Node]]
    ) -> tuple[list[Node], Node | None]:
        """The wait with the views that move along, and the first other node that needs one of them."""
        unit = [wait_node]
        while True:
            behind = [u for node in unit for u in users.get(node, ()) if u not in unit]
            anchor = min(behind, default=None)
            call = None if anchor is None else program.call(anchor)
            if anchor is None or call is None or not is_view(call.op) or not program.aliasing.effects(anchor).pure:
                return unit, anchor
            unit.append(anchor)

    def rewrite(self, op, m):
        return Together([Move(node, m.bindings["anchor"]) for node in m.bindings["unit"]])

    examples = [
        fires(_reduced_early, "f32[4, 8]", "f32[4]", **ATEN),
        declines(_nothing_between, "f32[4]", **ATEN),
    ]


@dataclass(frozen=True)
class StartEarly(Rule):
    """f(y); all_gather(x) -> all_gather(x); f(y)

    By the cost model, a collective starts just early enough to be done when it is waited for. If its operand is not
    computed by then, or if its cost is not known, it starts as soon as the operand is computed. It never starts before
    an earlier collective, nor while its result, together with earlier results that are still needed, would take more
    than `megabytes`. Views and pointwise operations that only the collective needs move with it.
    """

    megabytes: float = IN_FLIGHT

    def sites(self, program: Program) -> Iterator[Match]:
        order = Order(program)
        clock = Clock(program.graph)
        wanted = latest_starts(program.graph, clock, program.options.link)
        needed_until: list[tuple[Node, int]] = []
        """For each collective so far: the last node that needs its result, and how many bytes it receives."""
        previous: Node | None = None
        for collective in list(collectives(program.graph)):
            size = _received(collective)
            unit = _unit_of(program, collective)
            needed = {n for node in unit for n in order.before[node] if n not in unit}
            anchor = after(max(n for n in (*needed, previous) if n is not None)) if needed or previous else unit[0]
            if size is None or not collective.waits:
                anchor = collective.node
            else:
                anchor = _with_room(anchor, needed_until, self.megabytes * MEGABYTE - size)
            start = wanted.get(collective.node)
            if start is not None:
                anchor = max(anchor, clock.place(start.latest))
            if anchor < unit[0] and _others_between(anchor, collective.node, unit):
                places = (collective.node, anchor)
                exposed = None if start is None else [start.exposed(clock.at(place)) for place in places]  # seconds
                operand = collective.operands[0]
                yield Match.at(program, collective.node, unit=unit, anchor=anchor, operand=operand, exposed=exposed)
            previous = collective.node
            if size is not None and collective.waits:
                needed_until.append((_last_need(program, collective), size))

    def check(self, m):
        if (exposed := m.bindings["exposed"]) is not None:
            m.require(exposed[0] > 0, "the computation between start and wait already takes longer than the collective")
            device = m["operand"].device
            m.pays(*(Work.of(device, Waiting(seconds), on_every_rank=True) for seconds in exposed))

    def rewrite(self, op, m):
        return Together([Move(node, m.bindings["anchor"]) for node in m.bindings["unit"]])

    examples = [
        fires(_two_layers, *LAYERS, **ATEN),
        fires(_two_layers, *LAYERS, settings={"megabytes": 3e-4}, **ATEN),
        declines(_nothing_between, "f32[4]", **ATEN),
    ]


def _with_room(anchor: Node, needed_until: list[tuple[Node, int]], room: float) -> Node:
    """The first place from `anchor` on where results that are still needed take no more than `room` bytes."""
    while True:
        needed = [(last, size) for last, size in needed_until if not last < anchor]
        if not needed or sum(size for _, size in needed) <= room:
            return anchor
        anchor = after(min(last for last, _ in needed))


def _last_need(program: Program, collective: Collective) -> Node:
    """The last node that reads a result, or waits for one; results that are returned stay in memory in any case."""
    waits = collective.waits
    uses = [reader for wait_node in waits for reader in readers(program, wait_node) if reader.op != "output"]
    return max((*waits, *uses))


def _received(collective: Collective) -> int | None:
    sizes = [bytes_moved(tensor_fact(result)) for result in collective.results]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _unit_of(program: Program, collective: Collective) -> list[Node]:
    """A collective with the light operations that compute its operands for it alone, in order."""
    unit = [collective.node]
    work = list(collective.operands)
    while work:
        node = work.pop()
        call = program.call(node)
        is_light = call is not None and (is_view(call.op) or is_pointwise(call.op))
        if node in unit or not is_light or not program.aliasing.effects(node).pure:
            continue
        if all(user in unit for user in node.users):
            unit.append(node)
            work += node.all_input_nodes
    return sorted(unit)


def _others_between(first: Node, last: Node, unit: Iterable[Node]) -> bool:
    """Is any node outside `unit` between `first` (inclusive) and `last`, not counting placeholders and the output?"""
    node = first
    while node is not last:
        if node not in unit and node.op not in ("placeholder", "output"):
            return True
        node = node.next
    return False


@dataclass(frozen=True)
class OverlapScheduling(Pass):
    """Starts collectives early enough to be done when they are needed, and waits for them as late as possible.

    `megabytes` limits the memory of results that are received before they are needed.
    """

    name = "overlap_scheduling"
    default = False

    megabytes: float = IN_FLIGHT

    def rules(self) -> Sequence[Rule]:
        # the waits first: their positions determine how much time each collective has
        return (WaitLate(), StartEarly(self.megabytes))
