"""Interleaved measurement: all candidates in one process, in turns; the median of many rounds."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

WARM_UP = 4
LONG_ENOUGH = 20e-3
"""Seconds that a turn should take, so that the clock's resolution and synchronisation do not matter."""


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Call, device: str, times: int) -> float:
    """Milliseconds per call, over `times` calls in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / times * 1e3


def turns(calls: Mapping[str, Call], device: str, rounds: int, times: int | None = None) -> dict[str, list[float]]:
    """Milliseconds per call, one figure per round. Every other round runs in reverse order, so that no candidate always
    follows the same one.

    Without `times`, each turn has as many calls as the quickest candidate needs for `LONG_ENOUGH`, up to 100.
    """
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    if times is None:
        quickest = min(timed(call, device, 1) for call in calls.values()) / 1e3
        times = max(1, min(100, round(LONG_ENOUGH / max(quickest, 1e-6))))
    figures: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()  # a collection would be charged to whoever happens to run
    try:
        for number in range(rounds):
            for name in reversed(calls) if number % 2 else calls:
                figures[name].append(timed(calls[name], device, times))
    finally:
        if collecting:
            gc.enable()
    return figures


def compare(calls: Mapping[str, Call], device: str, rounds: int, times: int | None = None) -> dict[str, float]:
    """The median of `turns`, by candidate."""
    return {name: statistics.median(figures) for name, figures in turns(calls, device, rounds, times).items()}


def relative_error(tensors: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The norm of all differences over the norm of the exact values; inf where a value is not finite."""
    differences = (t.detach().to(e.dtype) - e.to(t.device) for t, e in zip(tensors, exact, strict=True))
    difference, total = _norm(differences), _norm(exact)
    error = difference / total if total else difference
    return error if error == error else float("inf")


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors))


@dataclass(frozen=True)
class Kernels:
    """What one call runs on the GPU; copies and memsets are not kernels."""

    count: int
    ms: float
    """Of all kernels together. If a call takes longer than that, the GPU waits for the host."""


def kernels_of(call: Call) -> Kernels | None:
    """The kernels of one call, None if the profiler sees none."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    microseconds = [
        event.device_time
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return Kernels(len(microseconds), sum(microseconds) / 1e3) if microseconds else None
