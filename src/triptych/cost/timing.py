"""How long work takes: on a GPU by its own clock, on a CPU by the host's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import _private

Run = Callable[[], Any]

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


def seconds(run: Run) -> float:
    """The best of `rounds_on_gpu`, because other work on the machine only adds to the time."""
    return min(rounds_on_gpu(run))


def rounds_on_gpu(run: Run, rounds: int = 5, least: float = 1e-3) -> list[float]:
    """Seconds that one call keeps the GPU busy, in some rounds, each at least `least` seconds long.

    The time in which the host launches kernels does not count. A call from Python, with tuning and checks, can take the
    host longer than a small kernel takes the GPU, and generated code launches the same kernel in a fraction of that.
    """
    for _ in range(3):
        run()
    launching = min(_launching(run) for _ in range(3))
    enough = least / max(_round(run, 1, launching), 1e-7)
    times = max(1, min(100, int(enough), int(LONGEST_WAIT / _wait(launching))))
    return [_round(run, times, launching) for _ in range(rounds)]


def rounds_in_turns(
    runs: Sequence[Run], rounds: int = 20, least: float = 5e-4, most: float = 0.1
) -> list[list[float]]:
    """Seconds that one call of each takes on the CPU, in some rounds, each at least `least` seconds long. The rounds of
    the candidates alternate: other load on the machine, which slows even the time of one thread, then falls on all of
    them alike. There are fewer rounds if all together would take more than `most` seconds, but not fewer than two. The
    first call of each, which also prepares its kernels, does not count.
    """
    for run in runs:
        run()
    once = [_on_cpu(run, 1) for run in runs]
    times = [max(1, min(100, int(least / max(seconds, 1e-6)))) for seconds in once]
    all_once = sum(count * seconds for count, seconds in zip(times, once))
    rounds = max(2, min(rounds, int(most / max(all_once, 1e-9))))
    results = [[_on_cpu(run, count) for run, count in zip(runs, times)] for _ in range(rounds)]
    return [list(of_one) for of_one in zip(*results)]


def _on_cpu(run: Run, times: int) -> float:
    # the time of a thread leaves out what other programs on the machine take, but also what other threads do
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(times):
        run()
    return (clock() - start) / times


def _launching(run: Run) -> float:
    """Seconds that the host takes to launch one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _round(run: Run, times: int, launching: float) -> float:
    """Seconds per call. The GPU first waits until the host has launched all calls, then runs them in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _private.gpu_sleep(int(min(times * _wait(launching), LONGEST_WAIT) * CYCLES_A_SECOND))
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def _wait(launching: float) -> float:
    """How long the GPU waits for one call that took the host this long to launch: twice as long, to be safe."""
    return 2 * launching + 1e-5
