"""How long work takes on a GPU, by CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]


def seconds(work: Work, rounds: int = 5, least: float = 1e-3) -> float:
    """The time of the fastest of some rounds, each long enough for the clock's resolution: other work on the machine
    can only add time."""
    for _ in range(3):
        work()
    times = max(1, min(100, int(least / max(_round(work, 3), 1e-7))))
    return min(_round(work, times) for _ in range(rounds))


def _round(work: Work, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times
