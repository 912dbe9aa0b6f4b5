"""Sums over kernel launches, of some of which nothing may be known: the sum is then the least that it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .launches import Launch
from .phrases import count

UNKNOWN = "?"


@dataclass(frozen=True)
class Total:
    value: float | None
    """None: nothing of it is known."""
    unknown: int = 0
    """How many launches it leaves out."""

    def text(self, shown: Callable[[float], str]) -> str:
        """"9.1 MB", "at least 9.1 MB, 3 launches unknown", or "?"."""
        if self.value is None:
            return UNKNOWN
        if not self.unknown:
            return shown(self.value)
        return f"at least {shown(self.value)}, {count(self.unknown, 'launch', 'launches')} unknown"


def cost_total(launches: Iterable[Launch], what: str) -> Total:
    """The sum of "gemms", "bytes" or "seconds" by estimate."""
    costs = [launch.cost for launch in launches]
    known = [getattr(cost, what) for cost in costs if cost is not None]
    return Total(sum(known) if known or not costs else None, len(costs) - len(known))
