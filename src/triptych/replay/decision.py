"""When replaying a program pays: decided by the clock, at its first calls, and by the memory that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .device import Device

CALLS_TIMED = 3
"""How many calls, and how many replays, are timed. The fastest counts."""
GAIN = 0.97
"""A replay is worth keeping if it takes at most this part of the time of a call."""
WAITS = 3.0
"""A program of which the GPU's part takes this many times as long as the host's does not wait for the host."""
OF_DEVICE = 0.01
"""A program may always take this part of the device's memory."""


@dataclass(frozen=True)
class Policy:
    """What the user asked for."""

    always: bool = False
    """`cuda_graphs="on"`: neither the clock nor the memory decides."""
    memory: float = 0.1
    """The part of the process's peak of memory that may be added to it."""


BY_THE_CLOCK = Policy()


@dataclass
class Timed:
    """Some calls of one kind, each with the host's time and two points on the device."""

    host: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    waiting: list[tuple[Any, Any]] = field(default_factory=list)

    def call(self, run: Callable[[], Any], device: Device) -> Any:
        first = device.mark()
        begin = time.perf_counter()
        result = run()
        self.host.append(time.perf_counter() - begin)
        self.waiting.append((first, device.mark()))
        return result

    def is_enough(self, device: Device) -> bool:
        """Have enough calls been timed, and has the device come to their ends? Nobody waits for it."""
        while self.waiting and (seconds := device.seconds_between(*self.waiting[0])) is not None:
            self.device.append(seconds)
            del self.waiting[0]
        return len(self.device) >= CALLS_TIMED

    def has_enough_calls(self) -> bool:
        return len(self.host) >= CALLS_TIMED

    @property
    def of_host(self) -> float:
        return min(self.host)

    @property
    def of_device(self) -> float:
        return min(self.device)

    @property
    def seconds(self) -> float:
        """A call keeps the program busy for the longer of both."""
        return max(self.of_host, self.of_device)


def too_long_on_device(calls: Timed) -> str | None:
    """Why a program does not wait for the host."""
    if calls.of_device < WAITS * calls.of_host:
        return None
    return f"it does not wait for the host: {shown(calls.of_device)} on the GPU, {shown(calls.of_host)} on the host"


def not_faster(calls: Timed, replays: Timed) -> str | None:
    if replays.seconds <= GAIN * calls.seconds:
        return None
    return f"a replay takes {shown(replays.seconds)}, a call {shown(calls.seconds)}"


def too_much_memory(used: int, peak: int, there: int, policy: Policy) -> str | None:
    """Why the memory in use is too much, beside the peak without the recording and the memory that is there."""
    if policy.always or used - peak <= max(policy.memory * peak, OF_DEVICE * there):
        return None
    allowed = f"{policy.memory:.0%} more than without are allowed"
    return f"it would take {(used - peak) / 2**20:.0f} MB more memory than the peak of {peak / 2**20:.0f} MB; {allowed}"


def shown(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
