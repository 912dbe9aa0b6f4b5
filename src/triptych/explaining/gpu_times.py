"""What a GPU does in a step, by its own clock, and for which launch: read from the trace of torch's profiler."""

from __future__ import annotations

import bisect
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .launches import Launch
from .probe import RANGE

STEP = "triptych step "
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
MICROSECOND = 1e-6
NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True)
class GpuWork:
    """A kernel, a copy or a fill."""

    launch: int
    """The number of the launch that it is of; -1 if that is not known."""
    name: str
    start: float
    seconds: float
    lane: str


def profiled(run: Callable[[AbstractContextManager[Any]], Any], steps: int) -> dict[str, Any]:
    """The trace of some steps, as torch's profiler writes it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(steps):
            run(_Step(number))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return trace


class _Step:
    """A step, which ends when the GPU has done all of it."""

    def __init__(self, number: int) -> None:
        self.range = torch.profiler.record_function(f"{STEP}{number}")

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self.range.__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.cuda.synchronize()
        self.range.__exit__(*raised)


def gpu_work(trace: dict[str, Any], launches: Sequence[Launch]) -> list[list[GpuWork]]:
    """What the GPU did in each step, in order.

    A kernel belongs to the launch during which the host started it. Kernels of a CUDA graph are started together,
    outside of all launches: those are assigned by their order and their names.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps, ranges = _Ranges(events, STEP), _Ranges(events, RANGE)
    started = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ON_HOST and "correlation" in event.get("args", {})
    }
    by_step: dict[int, list[GpuWork]] = defaultdict(list)
    for event in sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: float(e["ts"])):
        start = started.get(event.get("args", {}).get("correlation"))
        if start is None or (step := steps.at(start, any_thread=True)) is None:
            continue
        number = ranges.at(start)
        lane = f"stream {event['args'].get('stream', event.get('tid', ''))}"
        began, seconds = float(event["ts"]) * MICROSECOND, float(event["dur"]) * MICROSECOND
        by_step[step].append(GpuWork(-1 if number is None else number, str(event["name"]), began, seconds, lane))
    return [by_order(by_step[step], launches) for step in sorted(by_step)]


class _Ranges:
    """The ranges of the profiler whose names are a prefix and a number, to be found by time and thread."""

    def __init__(self, events: Iterable[dict[str, Any]], prefix: str) -> None:
        self.ranges: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
        for event in events:
            name = str(event.get("name", ""))
            on_host = event.get("cat") in ("user_annotation", "cpu_op")
            if on_host and name.startswith(prefix) and (number := name[len(prefix) :]).isdigit():
                begin = float(event["ts"])
                for thread in (event.get("tid"), None):
                    self.ranges[thread].append((begin, begin + float(event["dur"]), int(number)))
        for ranges in self.ranges.values():
            ranges.sort()

    def at(self, event: dict[str, Any], any_thread: bool = False) -> int | None:
        """The number of the range in which an event began, on the same thread unless any may do."""
        ranges = self.ranges.get(None if any_thread else event.get("tid"), [])
        when = float(event["ts"])
        place = bisect.bisect_right(ranges, (when, float("inf"), 0)) - 1
        return ranges[place][2] if place >= 0 and when <= ranges[place][1] else None


def by_order(work: Sequence[GpuWork], launches: Sequence[Launch]) -> list[GpuWork]:
    """Assigns what belongs to no launch to those that nothing was assigned to, if that is certain.

    Generated kernels have the names that their launches have, and come in the same order. What lies between two of
    them belongs to the one launch of a library between these two; with more than one, it is not known whose it is.
    """
    assigned = {one.launch for one in work}
    waiting = [number for number, launch in enumerate(launches) if number not in assigned]
    if assigned - {-1} or not waiting:
        return list(work)  # the host started the kernels one by one: what is left over is no launch's
    numbers = [-1] * len(work)
    place = 0
    anchors = [(-1, -1)]
    for index, one in enumerate(work):
        match = next((i for i in range(place, len(waiting)) if _is_of(one.name, launches[waiting[i]])), None)
        if match is not None:
            numbers[index] = waiting[match]
            anchors.append((index, match))
            place = match + 1
    anchors.append((len(work), len(waiting)))
    for (index, match), (next_index, next_match) in zip(anchors, anchors[1:]):
        between = [n for n in waiting[match + 1 : next_match] if not launches[n].generated]
        if len(between) == 1:
            numbers[index + 1 : next_index] = between * (next_index - index - 1)
    return [GpuWork(number, o.name, o.start, o.seconds, o.lane) for number, o in zip(numbers, work)]


def _is_of(kernel: str, launch: Launch) -> bool:
    """Of a kernel that a program launches itself, generated code adds a number to the name."""
    return launch.generated and kernel in (launch.name, NUMBER.sub("", launch.name))
