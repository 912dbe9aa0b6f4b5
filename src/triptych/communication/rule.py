"""The rule that joins like collectives: what the passes that fill buckets have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..errors import TriptychError
from ..ir.collectives import Collective
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.rule import Match, Rule
from .buckets import MEGABYTE, WAYS, buckets, join, likes
from .placement import placement

DEFAULT_MEGABYTES = 25.0
"""As large as the buckets of DistributedDataParallel."""


@dataclass(frozen=True)
class JoinCollectives(Rule):
    """Subclass with a kind of collective and, if not all of them, which."""

    megabytes: float = DEFAULT_MEGABYTES
    by: str = "concatenation"

    exact = False
    kind: ClassVar[str] = ""
    at_first: ClassVar[bool] = False
    """Start the bucket where its first member was, not behind its last operand."""
    at_end: ClassVar[bool] = False
    """Wait at the end of the graph."""

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise TriptychError(f"collectives are joined by {' or by '.join(WAYS)}, not by {self.by!r}")

    def wanted(self, program: Program, collective: Collective) -> Refusal | None:
        """Why a collective is none of the rule's; None if it is."""
        return None

    def sites(self, program: Program) -> Iterator[Match]:
        for members, refused in list(likes(program, self.kind, lambda c: self.wanted(program, c))):
            if len(members) + len(refused) > 1:
                yield from (Match.at(program, c.node, problem=problem) for c, problem in refused)
            for bucket in buckets(program, members, round(self.megabytes * MEGABYTE)):
                if len(bucket) > 1:
                    yield self._site(program, bucket)

    def _site(self, program: Program, bucket: tuple[Collective, ...]) -> Match:
        nodes = [member.node for member in bucket]
        place = placement(program, bucket, self.at_first, self.at_end)
        # what was joined before may have made one depend on another
        problem = Refusal("one needs the result of another", at=nodes[-1]) if place is None else None
        return Match.at(program, *nodes, covers=[w for m in bucket for w in m.waits], problem=problem,
                        bucket=bucket, place=place)  # fmt: skip

    def rewrite(self, op, m):
        return join(op, m.program, m.bindings["bucket"], m.bindings["place"], self.by)
