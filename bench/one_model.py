"""Measures one model in one mode, in a separate process; `bench/suite.py` starts it and reads what it reports.

    python bench/one_model.py MODEL inference|training [--device cpu] [--variants eager,inductor,triptych] [--rounds 15]

A report is one line of JSON on standard output: the state, the figures of a variant, or why there are none. Everything
else that is printed goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from device_lock import DeviceLock
from measure import kernels_of, relative_error, synchronize, turns
from models import TRAINING, Unavailable, Workload, build
from processes import MEASURING, WAITING
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.utils import clear_caches
from torch.utils import _pytree as pytree
from variants import EAGER, INDUCTOR, TRIPTYCH, VARIANTS, Variant

from triptych.cost import clock
from triptych.replay.program import Program, programs

Report = Callable[[dict[str, Any]], None]

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}
"""The relative difference that two correct results in this dtype may have."""


CALLS_UNTIL_DECIDED = 12
"""After so many calls, a program is replayed as CUDA graphs, or it is decided that it is not."""


class Subject:
    """A model on its device, with the exact result that every variant is compared to."""

    def __init__(self, workload: Workload, mode: str, device: str) -> None:
        self.mode, self.device = mode, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.workload = workload.to(device, self.dtype)
        self.program = self.workload.program(mode)
        self.weights = list(self.program.parameters())  # listing them at each step takes the host a millisecond
        self.exact = self._exact()
        self.own_bytes = sum(t.untyped_storage().nbytes() for t in self._tensors())

    def step(self, run: Callable[..., Tensor], graphs: bool = False) -> Tensor:
        """One call: a forward, in training also a backward pass."""
        for weight in self.weights if self.mode == TRAINING else ():
            weight.grad = None
        if graphs:  # after dropping the gradients: they are in memory that a replay writes
            torch.compiler.cudagraph_mark_step_begin()
        if self.mode != TRAINING:
            with torch.no_grad():
                return run(**self.workload.inputs)
        loss = run(**self.workload.inputs)
        loss.backward()
        return loss

    def error(self, result: Tensor) -> float:
        """The error of the last step's result; in training, the larger of those of the loss and of the gradients."""
        output, gradients = self.exact
        error = relative_error([result], [output])
        return max(error, relative_error(_gradients(self.program), gradients)) if gradients else error

    def _exact(self) -> tuple[Tensor, list[Tensor]]:
        """The exact result: on a GPU in float32; on a CPU in float64, or in float32 if float64 fails."""
        if self.device == "cpu":
            try:
                return self._run_in(torch.float64)
            except RuntimeError as error:
                print(f"does not run in float64: {error}")
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._run_in(torch.float32)

    def _run_in(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        workload = self.workload.to(self.device, dtype)
        program = workload.program(self.mode)
        with torch.set_grad_enabled(self.mode == TRAINING):
            result = program(**workload.inputs)
        if self.mode == TRAINING:
            result.backward()
        # not on the GPU, whose memory is measured
        return result.detach().cpu(), [gradient.cpu() for gradient in _gradients(program)]

    def _tensors(self) -> list[Tensor]:
        leaves = [*self.program.parameters(), *self.program.buffers(), *pytree.tree_leaves(self.workload.inputs)]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _gradients(program: torch.nn.Module) -> list[Tensor]:
    return [weight.grad for weight in program.parameters() if weight.grad is not None]


def time_kernels_in_turn(lock: DeviceLock) -> None:
    """Inductor's code generator and Triptych's cost model time kernels to choose: let one process at a time do so."""

    def alone(time: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(time)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with lock.tuning():
                return time(*args, **kwargs)

        return timed

    of_inductor = type(benchmarker)
    of_inductor.benchmark_gpu = alone(of_inductor.benchmark_gpu)  # type: ignore[method-assign]
    clock.rounds_on_gpu = alone(clock.rounds_on_gpu)


@contextlib.contextmanager
def kernels_in(folder: Path) -> Iterator[None]:
    """Store compiled kernels in this folder, and look for them only there."""
    clear_caches()
    where = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    with mock.patch.dict(os.environ, where):
        yield
    clear_caches()


def warm_up(device: str, scratch: str) -> None:
    """Compile a tiny program with both, so that imports and the start of compile processes count for neither."""
    with kernels_in(Path(scratch, "warm-up")):
        for name in (INDUCTOR, TRIPTYCH):
            VARIANTS[name].compile(torch.nn.ReLU())(torch.ones(2, device=device))
    torch._dynamo.reset()


@dataclass
class Prepared:
    """A compiled variant."""

    call: Callable[[], Tensor]
    replayed: list[Program]
    """What may be replayed of it."""


def prepare(subject: Subject, variant: Variant, scratch: str) -> tuple[dict[str, Any], Prepared]:
    """Compile by the first call.

    The variants of one compiler share their kernels, which saves half of the time. So only the first one has a compile
    time. No compiler profits from what the other one compiled.
    """
    run = variant.compile(subject.program)
    call = lambda: subject.step(run, variant.graphs)  # noqa: E731
    generated, others = metrics.generated_kernel_count, set(programs)
    folder = Path(scratch, variant.compiler)
    is_first = not folder.exists()
    folder.mkdir(exist_ok=True)
    with kernels_in(folder):
        start = time.perf_counter()
        call()
        synchronize(subject.device)
        seconds = time.perf_counter() - start
    compiled = variant.name != EAGER
    figures = {
        "compile_s": seconds if compiled and is_first else None,
        "kernels": metrics.generated_kernel_count - generated if compiled and subject.device == "cpu" else None,
    }
    subject.program.zero_grad(set_to_none=True)
    free_memory(subject.device)
    return figures, Prepared(call, [one for one in programs if one not in others])


def settle(subject: Subject, prepared: Prepared) -> dict[str, Any]:
    """Call until nothing more is decided or recorded; error, peak memory and what was decided.

    Memory that the allocator keeps for recorded CUDA graphs alone counts as used.
    """
    cuda = subject.device == "cuda"
    call, idle = prepared.call, idle_memory()
    allocated = torch.cuda.memory_allocated() if cuda else 0
    for _ in range(CALLS_UNTIL_DECIDED if cuda else 1):
        call()
        synchronize(subject.device)
    free_memory(subject.device)
    kept_for_graphs = idle_memory() - idle
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    result = call()
    figures = {"error": subject.error(result), "bytes": None}
    if cuda:
        peak = torch.cuda.max_memory_allocated() + kept_for_graphs
        figures["bytes"] = peak - allocated + subject.own_bytes
        figures["replays"] = [f"{one.name}: {one.verdict()}" for one in prepared.replayed]
    del result
    subject.program.zero_grad(set_to_none=True)
    free_memory(subject.device)
    return figures


def idle_memory() -> int:
    """Bytes that the allocator has and that no tensor is in."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # other processes need it too


def measure(subject: Subject, variants: dict[str, Prepared], rounds: int, report: Report) -> None:
    """Time all variants in turns; count the kernels that each launches, and measure their time without the host."""
    for name, prepared in variants.items():
        report({"variant": name, "figures": settle(subject, prepared)})
    calls = {name: prepared.call for name, prepared in variants.items()}
    for name, figures in turns(calls, subject.device, rounds).items():
        quarters = statistics.quantiles(figures, n=4) if len(figures) > 1 else [figures[0]] * 3
        times: dict[str, Any] = {"ms": statistics.median(figures), "quartiles_ms": [quarters[0], quarters[2]]}
        if subject.device == "cuda":
            kernels = kernels_of(calls[name])
            times |= {"kernels": kernels and kernels.count, "gpu_ms": kernels and kernels.ms}
        report({"variant": name, "figures": times})


def run(
    model: str, mode: str, device: str, names: Sequence[str], rounds: int, scratch: str, report: Report
) -> None:
    """Everything from building to timing; what goes wrong with one variant costs that variant only."""
    lock = DeviceLock(device)
    time_kernels_in_turn(lock)
    prepared: dict[str, Prepared] = {}
    report({"state": WAITING})
    with lock.compiling():
        report({"state": "building"})
        try:
            workload = build(model, small=device == "cpu")
        except Unavailable as error:
            report({"skipped": str(error)})
            return
        if mode == TRAINING and workload.loss is None:
            report({"skipped": "for inference only"})
            return
        warm_up(device, scratch)
        subject = Subject(workload, mode, device)
        _, plain = prepare(subject, VARIANTS[EAGER], scratch)
        report({"eager_error": subject.error(plain.call()), "rounding": ROUNDING[subject.dtype]})
    for name in names:
        report({"state": WAITING})
        with lock.compiling():
            report({"state": f"compiling {name}"})
            try:
                figures, prepared[name] = prepare(subject, VARIANTS[name], scratch)
            except Exception as error:
                traceback.print_exc()
                figures = {"failure": in_one_line(error)}
        report({"variant": name, "figures": figures})
    report({"state": WAITING})
    with lock.measuring(patient=True):  # the others of its wave compile first, not between measurements
        report({"state": MEASURING})
        if prepared:
            measure(subject, prepared, rounds, report)
    report({"finished": True})


def in_one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]


def end_with_the_suite() -> None:
    """Exit when standard input is closed: that happens when the process that started this one ends, however it ends."""

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock this thread would still hold when Python exits
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("mode")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variants", default="eager,inductor,triptych")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scratch", help="folder for compiled kernels; a temporary one otherwise")
    parser.add_argument("--supervised", action="store_true", help="end when standard input is closed")
    given = parser.parse_args()
    if given.supervised:
        end_with_the_suite()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(event: dict[str, Any]) -> None:
        reports.write(json.dumps(event) + "\n")

    # each variant is another compile of the same code
    torch._dynamo.config.recompile_limit = 64
    with tempfile.TemporaryDirectory() if given.scratch is None else contextlib.nullcontext(given.scratch) as scratch:
        run(given.model, given.mode, given.device, given.variants.split(","), given.rounds, scratch, report)


if __name__ == "__main__":
    main()
