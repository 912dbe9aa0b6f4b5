"""When a graph computes and when it communicates, by the cost model: two lanes, computation and communication.

A collective starts when the graph gets to it and the links are free; a wait holds the computation until its data is
there. Operators of symmetric memory keep both lanes busy. The figures are those of `costs.py`: the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..cost.communication import AUTOMATIC, communication_cost
from ..ir.collectives import Collective, awaited, collective, is_fused, is_wait
from ..ir.facts import tensor_fact
from ..ir.sizes import bytes_of
from .costs import collective_cost, compute_seconds, fused_cost, link_for, ranks_of

COMPUTATION, COMMUNICATION = "computation", "communication"


@dataclass(frozen=True)
class Interval:
    """Something that keeps a lane busy."""

    lane: str
    start: float
    seconds: float
    what: str
    """The kind of collective, or the operation that takes longest."""
    node: str
    """Its name in the graph."""
    nodes: int = 1
    """How many operations it stands for: computation between two points of communication is one interval."""
    bytes: int = 0
    """How many bytes are communicated."""


@dataclass(frozen=True)
class Timeline:
    """When a graph computes and when it communicates."""

    seconds: float
    computation: float
    communication: float
    exposed: float
    """Seconds in which nothing is computed."""
    collectives: dict[str, int]
    """How many there are, by kind."""
    intervals: tuple[Interval, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "intervals": [vars(interval) for interval in self.intervals]}


def timeline(graph: Graph, link: str = AUTOMATIC) -> Timeline | None:
    """The timeline of a graph; None if nothing is communicated in it."""
    nodes = list(graph.nodes)
    if not any(collective(node) is not None or is_fused(node) for node in nodes):
        return None
    lanes = _Lanes(link)
    for node in nodes:
        lanes.run(node)
    return lanes.finish()


class _Lanes:
    def __init__(self, link: str) -> None:
        self.link = link
        self.now = self.links_free = 0.0
        self.done: dict[Node, float] = {}
        self.counts: Counter[str] = Counter()
        self.intervals: list[Interval] = []
        self.pending: list[tuple[Node, float]] = []
        """The operations since the last point of communication, with their seconds."""

    def run(self, node: Node) -> None:
        if (communication := collective(node)) is not None:
            self._flush()
            cost = collective_cost(communication, self.link)
            # if the size is symbolic, only the part of the cost that does not depend on it
            seconds = cost.seconds if cost is not None else _without_data(communication, self.link)
            self.done[node] = self._communicate(
                node, communication.kind, seconds, sum(map(_size, communication.results))
            )
        elif is_wait(node):
            self._flush()
            source = awaited(node)
            if source is not None and source.node in self.done:
                self.now = max(self.now, self.done[source.node])
        elif is_fused(node):
            self._flush()
            self._fused(node)
        elif (seconds := compute_seconds(node)) > 0:
            self.pending.append((node, seconds))

    def _communicate(self, node: Node, kind: str, seconds: float, size: int) -> float:
        start = max(self.now, self.links_free)
        self.counts[kind] += 1
        self.intervals.append(Interval(COMMUNICATION, start, seconds, kind, node.name, 1, size))
        self.links_free = start + seconds
        return self.links_free

    def _fused(self, node: Node) -> None:
        """Both lanes are busy; what takes longer ends last."""
        name, cost = str(node.target).split(".")[1], fused_cost(node, self.link)
        done = self._communicate(node, name, cost.communication, cost.bytes)
        start = max(self.now, done - cost.communication)
        self.intervals.append(Interval(COMPUTATION, start, cost.computation, name, node.name))
        self.now = max(start + cost.computation, done)

    def _flush(self) -> None:
        if self.pending:
            seconds = sum(part for _, part in self.pending)
            longest = max(self.pending, key=lambda item: item[1])[0]
            what = getattr(longest.target, "__name__", str(longest.target)).partition(".")[0]
            interval = Interval(COMPUTATION, self.now, seconds, what, longest.name, len(self.pending))
            self.intervals.append(interval)
            self.now += seconds
            self.pending = []

    def finish(self) -> Timeline:
        self._flush()
        computation, communication = (_busy(self.intervals, lane) for lane in (COMPUTATION, COMMUNICATION))
        end = max((interval.start + interval.seconds for interval in self.intervals), default=0.0)
        kinds = dict(sorted(self.counts.items()))
        return Timeline(end, computation, communication, end - computation, kinds, tuple(self.intervals))


def _busy(intervals: Sequence[Interval], lane: str) -> float:
    return sum(interval.seconds for interval in intervals if interval.lane == lane)


def _size(node: Node) -> int:
    tensor = tensor_fact(node)
    return 0 if tensor is None else bytes_of(tensor)


def _without_data(communication: Collective, link: str) -> float:
    return communication_cost(communication.kind, 0, ranks_of(communication), link_for(communication, link)).seconds
