"""When operations of a graph run, by the cost model: how much is computed while a collective is under way."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..ir.collectives import collectives
from .costs import collective_cost, compute_seconds

MARGIN = 1.5
"""A collective starts this many times its modelled duration before it is needed: models are off by about as much."""


class Clock:
    """Seconds of computation before each node of a graph, as it stands."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op != "placeholder"]
        self.times: list[float] = []
        self._at: dict[Node, float] = {}
        elapsed = 0.0
        for node in self.nodes:
            self.times.append(elapsed)
            self._at[node] = elapsed
            elapsed += compute_seconds(node)

    def at(self, node: Node) -> float:
        """The time of a node; a node that was created since then has that of the next node that was not."""
        while node not in self._at:
            node = node.next
        return self._at[node]

    def place(self, time: float) -> Node:
        """The last node that starts no later than `time`: all nodes before it are done by then."""
        return self.nodes[max(0, bisect.bisect_right(self.times, time) - 1)]


@dataclass(frozen=True)
class Start:
    """When a collective must start to be done in time."""

    seconds: float
    """How long it takes."""
    latest: float
    """The latest time to start, with a margin, and with time for later collectives, which use the same links."""
    needed: float
    """When it is waited for."""

    def exposed(self, time: float) -> float:
        """Seconds of waiting for it, if it starts at that time and nothing else is under way."""
        return max(0.0, self.seconds - (self.needed - time))


def latest_starts(graph: Graph, clock: Clock, link: str) -> dict[Node, Start]:
    """The start of every collective that is waited for and whose cost is known. Collectives run one after the other,
    so each must also be done before the next one has to start."""
    starts: dict[Node, Start] = {}
    next_start = float("inf")
    for collective in reversed(list(collectives(graph))):
        cost = collective_cost(collective, link)
        if cost is None or not collective.waits:
            continue
        needed = min(clock.at(wait) for wait in collective.waits)
        latest = min(needed, next_start) - MARGIN * cost.seconds
        starts[collective.node] = Start(cost.seconds, latest, needed)
        next_start = latest
    return starts
