"""A clock that tests set: what a measurement would say of two forms, without a device to measure on."""

from __future__ import annotations

from triptych.cost import decision
from triptych.cost.clock import Clocked


def clock_says(monkeypatch, times):
    """From now on the clock gives these seconds for the old and the new form, or no answer if there are none. `times` may
    be a function of both. Returns the pairs of work that the clock is asked about."""
    asked = []

    def clocked(old, new):
        asked.append((old, new))
        seconds = times(old, new) if callable(times) else times
        return None if seconds is None else tuple(map(Clocked, seconds))

    monkeypatch.setattr(decision, "clocked", clocked)
    return asked
