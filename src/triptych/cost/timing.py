"""How long work takes: on a GPU by its own clock, on a CPU by the host's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import _private

Work = Callable[[], Any]

CYCLES_A_SECOND = 3.5e9
"""An upper bound on the clock rate of a GPU: waiting for this many cycles takes at least a second."""
LONGEST_WAIT = 0.1
"""Seconds that the GPU may wait for the host in one round."""


@contextmanager
def apart_from_the_program(device: torch.device) -> Iterator[None]:
    """For work that is timed while a program is compiled. Its time does not depend on the modes of the program, such as
    autocast and a default device, or of the compilation. The program draws the same random numbers as if nothing had
    been timed, and its hooks on saved tensors and its compiler for compiled autograd see nothing of the work."""
    gpus = [device] if device.type == "cuda" else []
    with (
        _private.plain_torch(), _private.without_python_dispatcher(), _private.without_autocast(),
        _private.without_compiled_autograd(), _without_saved_tensor_hooks(),
        torch.no_grad(), torch.random.fork_rng(gpus),
    ):  # fmt: skip
        yield


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    were_ignored = _private.ignore_saved_tensor_hooks(True)
    try:
        yield
    finally:
        _private.ignore_saved_tensor_hooks(were_ignored)


def seconds(work: Work, rounds: int = 5, least: float = 1e-3) -> float:
    """Seconds that one call of `work` keeps the GPU busy: the best of some rounds, each at least `least` seconds long,
    because other work on the machine only adds to the time.

    The time in which the host launches kernels does not count. A call from Python, with tuning and checks, can take the
    host longer than a small kernel takes the GPU, and generated code launches the same kernel in a fraction of that.
    """
    for _ in range(3):
        work()
    launching = min(_launching(work) for _ in range(3))
    enough = least / max(_round(work, 1, launching), 1e-7)
    times = max(1, min(100, int(enough), int(LONGEST_WAIT / _wait(launching))))
    return min(_round(work, times, launching) for _ in range(rounds))


def seconds_on_cpu(work: Work, rounds: int = 5, least: float = 2e-3, most: float = 0.2) -> float:
    """Seconds that one call of `work` takes on the CPU: the best of some rounds, each at least `least` seconds long.

    There are fewer rounds if they would take more than `most` seconds together. The first call also prepares the
    kernels, so it counts only if it takes as long as that by itself.
    """
    return seconds_in_turns([work], rounds, least, most)[0]


def seconds_in_turns(works: Sequence[Work], rounds: int = 20, least: float = 5e-4, most: float = 0.2) -> list[float]:
    """The same for several works, whose rounds alternate: other load on the machine, which slows even the time of one
    thread, then falls on all of them alike."""
    first = [_on_cpu(work, 1) for work in works]
    if sum(first) > most:
        return first
    once = [_on_cpu(work, 1) for work in works]
    times = [max(1, min(100, int(least / max(seconds, 1e-6)))) for seconds in once]
    all_once = sum(count * seconds for count, seconds in zip(times, once))
    rounds = max(1, min(rounds, int(most / max(all_once, 1e-9))))
    results = [[_on_cpu(work, count) for work, count in zip(works, times)] for _ in range(rounds)]
    return [min(seconds) for seconds in zip(*results)]


def _on_cpu(work: Work, times: int) -> float:
    # the time of a thread leaves out what other programs on the machine take, but also what other threads do
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(times):
        work()
    return (clock() - start) / times


def _launching(work: Work) -> float:
    """Seconds that the host takes to launch one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _round(work: Work, times: int, launching: float) -> float:
    """Seconds per call. The GPU first waits until the host has launched all calls, then runs them in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _private.gpu_sleep(int(min(times * _wait(launching), LONGEST_WAIT) * CYCLES_A_SECOND))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def _wait(launching: float) -> float:
    """How long the GPU waits for one call that took the host this long to launch: twice as long, to be safe."""
    return 2 * launching + 1e-5
