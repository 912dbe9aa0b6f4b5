"""The rule that joins similar collectives: the base of the rules of all bucketing passes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..cost.communication import large_enough
from ..errors import TriptychError
from ..ir.collectives import ALL_GATHER, Collective, bytes_moved
from ..ir.facts import tensor_of
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.rule import Match, Rule
from .buckets import CONCATENATION, MEGABYTE, WAYS, buckets, join, likes
from .costs import joining, link_for, ranks_of
from .placement import placement
from .units import unit_of

DEFAULT_MEGABYTES = 25.0
"""As large as the buckets of DistributedDataParallel."""

START_SHARE = 0.05
"""A bucket is large enough when starting it takes no more than this share of its time: a larger one would gain little,
and start later."""

BY_SIZE, BY_MODULE = "size", "module"


@dataclass(frozen=True)
class JoinCollectives(Rule):
    """Joins collectives of one kind. A subclass sets `kind`, and overrides `wanted` to take only some of them."""

    megabytes: float = DEFAULT_MEGABYTES
    by: str = CONCATENATION
    group_by: str = BY_SIZE

    exact = False
    kind: ClassVar[str] = ""
    at_first: ClassVar[bool] = False
    """Start the bucket where its first member was, not after its last operand."""
    at_end: ClassVar[bool] = False
    """Wait at the end of the graph."""
    up_to_limit: ClassVar[bool] = False
    """Fill a bucket up to its limit, even if it is large enough before."""

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise TriptychError(f"collectives are joined by {' or by '.join(WAYS)}, not by {self.by!r}")
        if self.group_by not in (BY_SIZE, BY_MODULE):
            raise TriptychError(f"collectives are grouped by {BY_SIZE} or by {BY_MODULE}, not by {self.group_by!r}")

    def wanted(self, program: Program, collective: Collective) -> Refusal | None:
        """Why the rule does not take a collective; None if it does."""
        return None

    def sites(self, program: Program) -> Iterator[Match]:
        for members, refused in list(likes(program, self.kind, lambda c: self.wanted(program, c))):
            if len(members) + len(refused) > 1:
                yield from (Match.at(program, c.node, problem=problem) for c, problem in refused)
            for bucket in self._buckets(program, members):
                if len(bucket) > 1:
                    yield self._site(program, bucket)

    def _buckets(self, program: Program, members: list[Collective]) -> Iterator[tuple[Collective, ...]]:
        units: dict[str, list[Collective]] = {}
        for member in members:
            units.setdefault(unit_of(member) if self.group_by == BY_MODULE else "", []).append(member)
        for unit, own in units.items():
            limit = sys.maxsize if unit else self._limit(program, own[0])
            yield from buckets(program, own, limit)

    def _limit(self, program: Program, member: Collective) -> int:
        limit = round(self.megabytes * MEGABYTE)
        if self.up_to_limit:
            return limit
        ranks = ranks_of(member)
        return min(limit, large_enough(member.kind, ranks, link_for(member, program.options.link), START_SHARE))

    def check(self, m):
        bucket = m.bindings["bucket"]
        copied = [member for member in bucket if member.kind == ALL_GATHER or m.program.aliasing.is_output(member.wait)]
        results = sum(bytes_moved(tensor_of(member.node)) or 0 for member in copied)
        m.pays(*joining(bucket, results, m.program.options.link, copies=self.by == CONCATENATION))

    def _site(self, program: Program, bucket: tuple[Collective, ...]) -> Match:
        nodes = [member.node for member in bucket]
        place = placement(program, bucket, self.at_first, self.at_end)
        # joining others before may have made one member depend on another
        problem = Refusal("one needs the result of another", at=nodes[-1]) if place is None else None
        return Match.at(program, *nodes, covers=[w for m in bucket for w in m.waits], problem=problem,
                        bucket=bucket, place=place)  # fmt: skip

    def rewrite(self, op, m):
        return join(op, m.program, m.bindings["bucket"], m.bindings["place"], self.by)
