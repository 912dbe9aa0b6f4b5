"""What a collective costs on a link: a latency for each step, and bytes over the bandwidth, by ring and by tree.

Nothing here depends on the machine: the same question gets the same answer on every rank, so that all ranks make the
same decisions. The figures are what links of a kind sustain, about four fifths of the data sheet's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UnknownName
from ..ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from .device import DeviceModel
from .parts import Part

RING, TREE = "ring", "tree"

TREE_RATE = 0.7
"""The fraction of the bandwidth that a tree reaches: in its upper levels not all links are busy."""

ROUNDS = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1}
"""How often the data goes around: an all-reduce is a reduce-scatter followed by an all-gather."""

MACHINE = 8
"""A group of up to this many GPUs is assumed to be in one machine."""


@dataclass(frozen=True)
class Link:
    """What connects a rank with the next one."""

    name: str
    bandwidth: float
    """Bytes a second, in one direction."""
    latency: float
    """Seconds for a step from one rank to the next, whatever its size."""
    start: float
    """Seconds to start a collective."""


LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 360e9, 1e-6, 8e-6),
        Link("pcie", 25e9, 2e-6, 10e-6),
        Link("infiniband", 40e9, 4e-6, 12e-6),
        Link("ethernet", 10e9, 15e-6, 25e-6),
        Link("memory", 5e9, 5e-6, 30e-6),
    )
}
"""By kind; `memory` is for processes of one machine without GPUs."""

AUTOMATIC = "auto"


def link_of(name: str, device_type: str, ranks: int) -> Link:
    """The link of that name, or for `auto` by what it connects: GPUs of one machine, of several machines, or processes
    on CPUs."""
    if name == AUTOMATIC:
        name = "memory" if device_type != "cuda" else "nvlink" if ranks <= MACHINE else "infiniband"
    if name not in LINKS:
        raise UnknownName("link", name, (AUTOMATIC, *LINKS))
    return LINKS[name]


@dataclass(frozen=True)
class CommunicationCost:
    """The estimate for one collective."""

    seconds: float
    algorithm: str
    """The faster one: ring or tree."""
    sent: float
    """Bytes that a rank sends."""


def communication_cost(kind: str, size: int, ranks: int, link: Link) -> CommunicationCost:
    """A collective over `size` bytes: of the whole tensor, not of one rank's part."""
    if ranks < 2:
        return CommunicationCost(link.start, RING, 0.0)
    rounds = ROUNDS[kind]
    sent = rounds * size * (ranks - 1) / ranks
    ring = link.start + rounds * (ranks - 1) * link.latency + sent / link.bandwidth
    depth = math.ceil(math.log2(ranks))
    tree = link.start + rounds * depth * link.latency + sent / (link.bandwidth * TREE_RATE)
    return CommunicationCost(min(ring, tree), RING if ring <= tree else TREE, sent)


@dataclass(frozen=True)
class Communicated(Part):
    """A collective over so many bytes of the whole tensor. How long it takes depends on the link alone."""

    what: str
    """The kind of the collective."""
    size: int
    ranks: int
    link: Link

    launches = 0

    def seconds(self, model: DeviceModel) -> float:
        return communication_cost(self.what, self.size, self.ranks, self.link).seconds


def large_enough(kind: str, ranks: int, link: Link, share: float) -> int:
    """How many bytes it takes until starting and latency are no more than this share of a collective's time."""
    fixed = communication_cost(kind, 0, ranks, link).seconds
    sent = ROUNDS[kind] * (ranks - 1) / ranks if ranks > 1 else 1.0
    return math.ceil(fixed * (1 - share) / share * link.bandwidth / sent)
