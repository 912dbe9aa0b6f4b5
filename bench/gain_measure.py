"""Compiles a program with a pass on and with it off, and times both in turns."""

from __future__ import annotations

import contextlib
import gc
import signal
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from device_lock import DeviceLock
from gain_subjects import candidates, fired, switch
from gain_workloads import WORKLOADS, Work
from measure import kernels_of, relative_error, turns
from one_model import in_one_line
from processes import MEASURING, WAITING
from torch.utils import _pytree as pytree

import triptych
from triptych.codegen.eager import EagerCodegen
from triptych.codegen.inductor import InductorCodegen
from triptych.explaining.record import Recording

Report = Callable[[dict[str, Any]], None]
ON, OFF = "on", "off"
LARGEST_DIFFERENCE = 0.05
"""Largest relative difference of the results with the pass and without; rounding in bfloat16 explains less."""
LIMIT = 150
"""Seconds that compiling a pass may take, and measuring it: no other process can measure meanwhile."""


def measure_all(names: Iterable[str], device: str, rounds: int, report: Report) -> None:
    """Report the figures of each pass, or why there are none."""
    lock = DeviceLock(device)
    torch._dynamo.config.recompile_limit = 64  # each variant is another compile of the same code
    for name in names:
        report({"variant": name, "figures": {"started": True}})
        report({"state": WAITING})
        try:
            with lock.compiling():
                report({"state": f"compiling {name}"})
                with at_most(LIMIT):
                    figures, calls = prepare(name, device)
            report({"state": WAITING})
            if calls:
                with lock.measuring():
                    report({"state": MEASURING})
                    with at_most(LIMIT):
                        figures |= timed(calls, device, rounds)
        except Exception as error:
            traceback.print_exc()
            figures = {"failure": in_one_line(error)}
        report({"variant": name, "figures": figures})
        calls = {}
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    report({"finished": True})


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """The process ends, by SIGALRM, if the block takes longer."""
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def prepare(name: str, device: str) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
    """Compile with the pass on and off: figures, and the calls to time; no calls if there is nothing to measure."""
    work = firing_work(name, device)
    if work is None:
        return {"skipped": "does not fire on its examples in the whole pipeline"}, {}
    calls: dict[str, Callable[[], Any]] = {}
    figures: dict[str, Any] = {"workload": work.what, "training": work.training}
    results: dict[str, list[Any]] = {}
    for which, options in zip((ON, OFF), switch(name)):
        calls[which], explanation = compiled(work, options)
        count = fired(explanation.passes, name)
        if which == ON and not count:
            return {"workload": work.what, "skipped": "does not fire on this workload here"}, {}
        if which == OFF and count:
            return {"workload": work.what, "skipped": "fires although it is removed"}, {}
        results[which] = on_copies(calls[which], work)
        figures[which] = {"kernels": explanation.kernel_launches, "bytes": explanation.kernel_bytes}
        if device == "cuda":
            kernels = kernels_of(calls[which])
            figures[which] |= {"kernels": kernels and kernels.count, "gpu_ms": kernels and kernels.ms}
        if which == ON:
            figures["rewrites"] = count
    if not work.random:
        figures["difference"] = relative_error(results[ON], results[OFF])
        if figures["difference"] > LARGEST_DIFFERENCE:
            return {"workload": work.what, "failure": f"results differ by {figures['difference']:.1e}"}, {}
    return figures, calls


def firing_work(name: str, device: str) -> Work | None:
    """The first candidate on which the pass fires. A workload is not tried here, but checked when it is compiled."""
    for work in candidates(name, device):
        if name in WORKLOADS:
            return work
        # a graph that only Inductor can run raises after the passes; without a compile, no passes are recorded
        with triptych.record() as explanation, contextlib.suppress(Exception), without_kernels():
            compiled(work, switch(name)[0])
        torch._dynamo.reset()
        if fired(explanation.passes, name):
            return work
    return None


def without_kernels() -> Any:
    """Run graphs operation by operation: generating kernels takes long. Passes still decide as for Inductor."""
    return mock.patch.object(InductorCodegen, "emit", lambda self, *given: EagerCodegen().emit(*given))


def compiled(work: Work, options: dict[str, Any]) -> tuple[Callable[[], Any], Recording]:
    """A call of the program, compiled and run once, and the recording of that."""
    with triptych.record() as explanation:
        run = torch.compile(
            work.program, backend=triptych.compile_fx, dynamic=work.dynamic,
            options={"on_error": "raise", **work.options, **options},
        )  # fmt: skip
        call = step(run, work)
        on_copies(call, work)
    return call, explanation


def on_copies(call: Callable[..., Any], work: Work) -> list[Any]:
    """What a call returns for fresh copies of the inputs."""
    return [t.clone() for t in call(copied(work.inputs))]


def copied(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the inputs: the program may write to its inputs, and later calls need the original values."""
    return [i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, torch.Tensor) else i for i in inputs]


def step(run: Callable[..., Any], work: Work) -> Callable[..., list[Any]]:
    """One call: a forward, in training also a backward. It returns floats, and the gradients of the inputs."""

    def floats(value: Any) -> list[Any]:
        leaves = pytree.tree_leaves(value)
        return [t for t in leaves if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())]

    own = copied(work.inputs)
    if not work.training:

        def forward(inputs: Sequence[Any] = own) -> list[Any]:
            with torch.no_grad():
                return floats(run(*inputs))

        return forward
    module = list(work.program.parameters()) if isinstance(work.program, torch.nn.Module) else []
    tangents: list[Any] = []

    def forward_and_backward(inputs: Sequence[Any] = own) -> list[Any]:
        leaves = [t for t in (*floats(list(inputs)), *module) if t.requires_grad]
        results = [t for t in floats(run(*inputs)) if t.requires_grad]
        tangents.extend(torch.ones_like(t) for t in results[len(tangents) :])
        gradients = torch.autograd.grad(results, leaves, tangents, allow_unused=True)
        return [*(t.detach() for t in results), *(g for g in gradients if g is not None)]

    return forward_and_backward


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds with the pass on and off, in turns, and how many times as fast it is with the pass."""
    figures = turns(calls, device, rounds)
    quarters = {which: statistics.quantiles(times, n=4) for which, times in figures.items() if len(times) > 1}
    ms = {which: statistics.median(times) for which, times in figures.items()}
    return {
        "ratio": ms[OFF] / ms[ON],
        "ms": ms,
        "quartiles_ms": {which: [three[0], three[2]] for which, three in quarters.items()},
    }
