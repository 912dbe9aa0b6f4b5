"""Time of the graph passes on a GPT-2 training step: ours and Inductor's, on the same graphs, in one process.

The joint graph is taken from AOTAutograd as it stands before any joint pass. The forward and backward graphs
are the two halves of that graph after Inductor's joint passes, so that the post-grad passes of both start
from the same nodes too. As in `torch.compile`, joint and forward graph generate their Python only when it is first
read, which here it is not; the partitioner's backward graph does so after every change. Runs of the two alternate;
the first of each, which builds patterns and fills caches, is listed separately. Processor time is measured: the
passes have one thread, and other load on the machine must not matter.

    python bench/pass_time.py [--layers 12] [--width 256] [--repeat 5] [--device cpu]
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as inductor_joint
from torch._inductor.fx_passes.post_grad import post_grad_passes as inductor_post_grad
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module

import triptych

Pass = Callable[[GraphModule], Any]


@dataclass
class Joint:
    """A joint graph and what the partitioner needs to cut it."""

    gm: GraphModule
    inputs: Any
    facts: dict[str, Any]

    @property
    def fake_mode(self) -> Any:
        return detect_fake_mode([n.meta["val"] for n in self.gm.graph.nodes if n.op == "placeholder"])


@dataclass
class Timing:
    """Processor seconds of one contender on one graph."""

    first: float
    nodes_after: int
    later: list[float] = field(default_factory=list)


def capture(layers: int, width: int, batch: int, length: int, device: str) -> Joint:
    """The joint graph of one training step of GPT-2, with the dropout that it has by default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, n_positions=length, vocab_size=1000,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train().to(device)
    model.loss_type = "ForCausalLM"  # without it a warning breaks the graph
    captured: list[Joint] = []

    def partition(gm: GraphModule, inputs: Any, **facts: Any) -> tuple[GraphModule, GraphModule]:
        captured.append(Joint(copy.deepcopy(gm), inputs, facts))
        return min_cut_rematerialization_partition(gm, inputs, **facts)

    backend = aot_autograd(fw_compiler=nop, partition_fn=partition, decompositions=select_decomp_table())
    tokens = torch.randint(2, config.vocab_size, (batch, length), device=device)
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(input_ids=tokens, labels=tokens)
    (joint,) = captured
    return joint


def halves(joint: Joint) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph, after Inductor's joint passes."""
    gm = inductor_joint(copy.deepcopy(joint.gm))
    return min_cut_rematerialization_partition(gm, joint.inputs, compiler="inductor", **joint.facts)


def timed(run: Pass, gm: GraphModule) -> tuple[float, int]:
    """Seconds of one run on a copy, and how many nodes it left: a run that did nothing would show there."""
    gm = copy.deepcopy(gm)
    gc.collect()
    start = time.process_time()
    result = run(gm)
    taken = time.process_time() - start
    return taken, len((gm if result is None else result).graph.nodes)


def compare(title: str, gm: GraphModule, contenders: dict[str, Pass], repeat: int) -> None:
    timings = {name: Timing(*timed(run, gm)) for name, run in contenders.items()}
    for number in range(repeat):
        # the order changes, so that neither always runs on the warmer machine
        for name in sorted(contenders, reverse=bool(number % 2)):
            timings[name].later.append(timed(contenders[name], gm)[0])
    nodes = len(gm.graph.nodes)
    for name, timing in timings.items():
        typical = median(timing.later)
        print(
            f"{title:9} {name:9} {nodes:5} -> {timing.nodes_after:5} nodes  median {1e3 * typical:8.1f} ms"
            f"  {1e3 * typical / nodes:6.3f} ms/node"
            f"  min {1e3 * min(timing.later):8.1f} ms  first {1e3 * timing.first:8.1f} ms"
        )
    ours, theirs = (median(timings[name].later) for name in ("triptych", "inductor"))
    print(f"{title:9} triptych / inductor = {ours / theirs:.2f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()

    with use_lazy_graph_module(True):
        joint = capture(given.layers, given.width, given.batch, given.length, given.device)
    print(f"GPT-2, {given.layers} layers of width {given.width}, training step, torch {torch.__version__}\n")
    fake_mode = joint.fake_mode
    with use_lazy_graph_module(True), V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)):
        # first, while neither contender has run: making the halves runs Inductor's joint passes, and would
        # warm them up
        compare(
            "joint",
            joint.gm,
            {"inductor": inductor_joint, "triptych": triptych.joint_graph_passes},
            given.repeat,
        )
        for title, gm in zip(("forward", "backward"), halves(joint), strict=True):
            compare(
                title,
                gm,
                {
                    "inductor": lambda gm: inductor_post_grad(gm, False),
                    "triptych": lambda gm: triptych.post_grad_passes(gm, False),
                },
                given.repeat,
            )


if __name__ == "__main__":
    main()
