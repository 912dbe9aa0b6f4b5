"""Time of the graph passes, ours and Inductor's, on the same graphs of several models, in one process.

The joint graph is taken from AOTAutograd as it stands before any joint pass; so is the graph for inference. The forward
and backward graphs are the two halves of the joint graph after Inductor's joint passes, so that the post-grad passes of
both start from the same nodes too; for inference they start from the graph after Inductor's joint passes. As in
`torch.compile`, joint and forward graph generate their Python only when it is first read, which here it is not; the
partitioner's backward graph does so after every change. Runs of the two alternate; the first of each, which builds
patterns and fills caches, does not count, and is shown for the first graph. Processor time is measured: the passes have
one thread, and other load on the machine must not matter.

The stage before autograd is measured too. Inductor does next to nothing there, so only our own time counts.

    python bench/pass_time.py [MODEL ...] [--repeat 5] [--device cpu|cuda] [--markdown]

With `--device cuda` the facts of all graphs say that the tensors are on a GPU, which need not be there: more passes
have something to do then.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from pass_graphs import SUBJECTS, Captured, capture
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as inductor_joint
from torch._inductor.fx_passes.post_grad import post_grad_passes as inductor_post_grad
from torch._inductor.fx_passes.pre_grad import pre_grad_passes as inductor_pre_grad
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module

import triptych

Pass = Callable[[GraphModule], Any]


@dataclass
class Timing:
    """Processor seconds of one contender on one graph."""

    first: float
    nodes_after: int
    later: list[float] = field(default_factory=list)

    @property
    def typical(self) -> float:
        return median(self.later)


@dataclass
class Row:
    """One graph of one model, and what both needed for it."""

    model: str
    graph: str
    nodes: int
    timings: dict[str, Timing]

    @property
    def ours(self) -> float:
        return self.timings["triptych"].typical

    @property
    def theirs(self) -> float:
        return self.timings["inductor"].typical

    @property
    def speed(self) -> float:
        """How many times as fast as Inductor's passes ours are."""
        return self.theirs / self.ours


def halves(captured: Captured) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph, after Inductor's joint passes."""
    gm = inductor_joint(copy.deepcopy(captured.joint))
    return min_cut_rematerialization_partition(gm, captured.joint_inputs, compiler="inductor", **captured.facts)


def timed(run: Pass, gm: GraphModule) -> tuple[float, int]:
    """Seconds of one run on a copy, and how many nodes it left: a run that did nothing would show there."""
    gm = copy.deepcopy(gm)
    gc.collect()
    start = time.process_time()
    result = run(gm)
    taken = time.process_time() - start
    return taken, len((gm if result is None else result).graph.nodes)


def compare(model: str, graph: str, gm: GraphModule, contenders: dict[str, Pass], repeat: int) -> Row:
    timings = {name: Timing(*timed(run, gm)) for name, run in contenders.items()}
    for number in range(repeat):
        # the order changes, so that neither always runs on the warmer machine
        for name in sorted(contenders, reverse=bool(number % 2)):
            timings[name].later.append(timed(contenders[name], gm)[0])
    return Row(model, graph, len(gm.graph.nodes), timings)


def rows_of(title: str, device: str, repeat: int) -> Iterator[Row]:
    """The graphs of a model, each measured."""
    captured = capture(title, device)
    for (gm, inputs), mode in zip(captured.torch_level, ("training", "inference")):
        with torch.set_grad_enabled(mode == "training"):
            contenders = {
                "inductor": lambda gm: inductor_pre_grad(gm, inputs),  # noqa: B023
                "triptych": lambda gm: triptych.pre_grad_passes(gm, inputs),  # noqa: B023
            }
            yield compare(title, f"pre-grad, {mode}", gm, contenders, repeat)
    joint, post_grad = contenders_of("joint"), contenders_of("post_grad")
    # first, while neither contender has run: making the halves runs Inductor's joint passes, and would warm them up
    with running(captured.joint):
        yield compare(title, "joint", captured.joint, joint, repeat)
        for name, gm in zip(("forward", "backward"), halves(captured), strict=True):
            yield compare(title, name, gm, post_grad, repeat)
    with running(captured.inference):
        yield compare(title, "joint, inference", captured.inference, joint, repeat)
        gm = inductor_joint(copy.deepcopy(captured.inference))
        yield compare(title, "post-grad, inference", gm, contenders_of("post_grad", True), repeat)


def contenders_of(stage: str, is_inference: bool = False) -> dict[str, Pass]:
    if stage == "joint":
        return {"inductor": inductor_joint, "triptych": triptych.joint_graph_passes}
    return {
        "inductor": lambda gm: inductor_post_grad(gm, is_inference),
        "triptych": lambda gm: triptych.post_grad_passes(gm, is_inference),
    }


def running(gm: GraphModule) -> Any:
    """The contexts in which a compiler runs passes on this graph."""
    import contextlib

    mode = detect_fake_mode([n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"])
    stack = contextlib.ExitStack()
    for context in (V.set_fake_mode(mode), tracing(TracingContext(mode))):
        stack.enter_context(context)
    return stack


def compared(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.graph.startswith("pre-grad")]


def summary(rows: Sequence[Row]) -> str:
    speeds = [row.speed for row in rows]
    mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
    total = sum(row.theirs for row in rows) / sum(row.ours for row in rows)
    worst = min(rows, key=lambda row: row.speed)
    return (
        f"as fast as Inductor's passes: {mean:.1f} times (geometric mean of {len(rows)} graphs), {total:.1f} times in all,"
        f" {worst.speed:.1f} times on the worst graph ({worst.model}, {worst.graph})"
    )


def line(row: Row) -> str:
    cells = [f"{row.model:10} {row.graph:21} {row.nodes:5} nodes"]
    for name, timing in row.timings.items():
        cells.append(
            f"{name} {1e3 * timing.typical:8.1f} ms  {1e3 * timing.typical / row.nodes:6.3f} ms/node"
            f"  first {1e3 * timing.first:7.1f} ms -> {timing.nodes_after:5}"
        )
    return "  ".join([*cells, f"{row.speed:5.2f}x"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    given = parser.parse_args()
    rows = []
    with use_lazy_graph_module(True):
        for title in given.models:
            for row in rows_of(title, given.device, given.repeat):
                rows.append(row)
                print(line(row), flush=True)
    print(summary(compared(rows)))


if __name__ == "__main__":
    main()
