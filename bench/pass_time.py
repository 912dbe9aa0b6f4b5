"""Time of the graph passes, ours and Inductor's, on the same graphs of ten models, in one process.

The joint graph is taken from AOTAutograd as it stands before any joint pass; so is the graph for inference. The forward
and backward graphs are the two halves of the joint graph after Inductor's joint passes, so that the post-grad passes of
both start from the same nodes too; for inference they start from the graph after Inductor's joint passes.

As in `torch.compile`, joint, inference and forward graphs generate their Python only when it is first read, which here
it is not. The partitioner's backward graph does so after every change. Our flow makes it one that does not, which is
part of what is timed of ours.

Runs of the two alternate; the first of each, which builds patterns and fills caches, is listed separately. Processor
time is measured: the passes have one thread, and other load on the machine must not matter.

Our passes before autograd are timed alone: Inductor does next to nothing there.

    python bench/pass_time.py [MODEL ...] [--repeat 5] [--device cpu|cuda] [--markdown]

With `--device cuda`, which needs a GPU, passes that leave graphs for a CPU alone have something to do too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
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
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module

import triptych

Pass = Callable[[GraphModule], Any]

PRE_GRAD = "pre-grad"


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
    def is_compared(self) -> bool:
        return "inductor" in self.timings

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
        ours = {"triptych": functools.partial(triptych.pre_grad_passes, example_inputs=inputs)}
        with torch.set_grad_enabled(mode == "training"):
            yield compare(title, f"{PRE_GRAD}, {mode}", gm, ours, repeat)
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
        "triptych": lambda gm: triptych.post_grad_passes(LazyGraphModule.from_graphmodule(gm), is_inference),
    }


@contextlib.contextmanager
def running(gm: GraphModule) -> Iterator[None]:
    """The contexts in which a compiler runs passes on this graph."""
    mode = detect_fake_mode([n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"])
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        yield


def summary(rows: Sequence[Row]) -> str:
    speeds = [row.speed for row in rows]
    mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
    total = sum(row.theirs for row in rows) / sum(row.ours for row in rows)
    worst = min(rows, key=lambda row: row.speed)
    return (
        f"{mean:.1f} times as fast as Inductor's passes (geometric mean of {len(rows)} graphs), {total:.1f} times in"
        f" all, {worst.speed:.1f} times on the worst graph ({worst.model}, {worst.graph})"
    )


def line(row: Row) -> str:
    cells = [f"{row.model:10} {row.graph:21} {row.nodes:5} nodes"]
    for name, timing in row.timings.items():
        cells.append(
            f"{name} {1e3 * timing.typical:8.1f} ms  {1e3 * timing.typical / row.nodes:6.3f} ms/node"
            f"  first {1e3 * timing.first:7.1f} ms -> {timing.nodes_after:5}"
        )
    return "  ".join([*cells, f"{row.speed:5.2f} times as fast"] if row.is_compared else cells)


def markdown(rows: Sequence[Row]) -> str:
    """Two tables: the graphs of which Inductor's passes take their time too, and those before autograd."""
    lines = [
        "| model | graph | nodes | Inductor, ms | Triptych, ms | Triptych, us a node | times as fast |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in filter(lambda row: row.is_compared, rows):
        per_node = 1e6 * row.ours / row.nodes
        figures = f"{1e3 * row.theirs:.0f} | {1e3 * row.ours:.0f} | {per_node:.0f} | {row.speed:.1f}"
        lines.append(f"| {row.model} | {row.graph} | {row.nodes} | {figures} |")
    lines += ["", "| model | graph | nodes | Triptych, ms | us a node |", "|---|---|---:|---:|---:|"]
    for row in (row for row in rows if not row.is_compared):
        figures = f"{1e3 * row.ours:.0f} | {1e6 * row.ours / row.nodes:.0f}"
        lines.append(f"| {row.model} | {row.graph} | {row.nodes} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown at the end")
    given = parser.parse_args()
    rows = []
    with use_lazy_graph_module(True):
        for title in given.models:
            for row in rows_of(title, given.device, given.repeat):
                rows.append(row)
                print(line(row), flush=True)
    if given.markdown:
        print(f"\n{markdown(rows)}\n")
    print(summary([row for row in rows if row.is_compared]))


if __name__ == "__main__":
    main()
