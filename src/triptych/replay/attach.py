"""Puts a `Program` in front of each compiled graph that can be recorded.

Inductor decides which parts of a graph can be: compiled with CUDA graphs in mind, a graph is split around what cannot,
such as work on a CPU. What Inductor would then record itself, we do. That holds for graphs that are loaded from a cache
too: what we have to know of a graph travels with it, as `Facts`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .. import _private
from ..ir.text import source_line
from ..options import Options
from .decision import Policy
from .device import Cuda, Device
from .handover import compiled_graphs
from .outputs import Role, Run
from .program import Program, all_programs

log = logging.getLogger("triptych")

FACTS = "triptych_replay"
"""The argument of Inductor's compile under which our facts travel with a compiled graph."""


@dataclass(frozen=True)
class Facts:
    """What is known of a graph before it is compiled."""

    visible: int | None
    """So many of its results leave the program, the others are for the backward; None for a backward."""
    reason: str = ""
    """Why it is not to be recorded."""
    donated: tuple[int, ...] = ()
    """Inputs of a backward, saved by the forward, whose memory it may overwrite."""

    def role(self, position: int | None) -> Role:
        """How a result leaves that is at this position of the graph's results; None if it stays inside the graph."""
        if position is None:
            return Role.KEPT
        if self.visible is None:
            return Role.HANDED
        return Role.OWN if position < self.visible else Role.KEPT


RECORDABLE = {"aten", "prims", "prim", "inductor", "inductor_prims", "triptych", "mkldnn", "quantized_decomposed"}
"""Namespaces of operators that never wait for the device, or of which Inductor knows which ones do."""


def reason_not_to(gm: GraphModule, options: Options) -> str:
    """Why the graph is not to be recorded by default: what it calls might wait for the device, or for other ranks."""
    if options.replays == "on":
        return ""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if isinstance(node.target, _private.OpOverload) and node.target.namespace not in RECORDABLE:
                where = source_of(node)
                return f"it calls {node.target}, which may wait for the GPU or for other ranks{where}"
    return ""


def source_of(node: Any) -> str:
    line = source_line(node)
    return f"  # {line}" if line else ""


@contextlib.contextmanager
def replaying(options: Options) -> Iterator[None]:
    """Graphs that are compiled or loaded inside are replayed by us, where Inductor would do it."""
    policy = Policy(always=options.replays == "on", memory=options.cuda_graphs_memory)
    put = None if options.replays == "off" else partial(attach, policy=policy, device_of=Cuda)
    with compiled_graphs(keep_what_is_needed_again, put, is_quiet=not policy.always):
        yield


def keep_what_is_needed_again(compiled: Any) -> None:
    """Let a backward overwrite copies of what the forward saved, where the graph is retained for one more backward."""
    facts = compiled.fx_kwargs.get(FACTS)
    if facts is not None and facts.donated:
        compiled.current_callable = with_copies(compiled.current_callable, facts.donated)


def with_copies(run: Run, donated: Sequence[int]) -> Run:
    def call(inputs: list[Any]) -> Sequence[Any]:
        if _private.keeps_graph():
            for i in donated:
                inputs[i] = copy_of(inputs[i])
        return run(inputs)

    return call


def copy_of(x: Tensor) -> Tensor:
    """A copy with the strides of the tensor, for which kernels were generated."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def attach(compiled: Any, *, policy: Policy, device_of: Callable[[int], Device]) -> bool:
    """Put programs in front of a compiled graph, or of its parts; False if nothing of it can be recorded."""
    facts = compiled.fx_kwargs.get(FACTS)
    info = compiled.cudagraph_info
    if facts is None or info is None or info.cudagraph_fail_reasons or len(compiled.device_idxs) != 1:
        return False
    if facts.reason:
        log.info("CUDA graphs: %s is not replayed: %s", name_of(compiled), facts.reason)
        return False
    device = device_of(next(iter(compiled.device_idxs)))
    fixed, written = set(compiled.fx_kwargs["static_input_idxs"] or ()), set(compiled.mutated_input_idxs)

    def put_in_front(run: Run, inputs: Sequence[int | None], results: Sequence[int | None], name: str) -> Program:
        return Program(
            run,
            [facts.role(position) for position in results],
            device,
            fixed={i for i, position in enumerate(inputs) if position in fixed},
            written={i for i, position in enumerate(inputs) if position in written},
            policy=policy,
            name=name,
        )

    parts = compiled.partition_maps
    if not parts:
        return False
    name = name_of(compiled)
    names = [f"{name}, part {n} of {len(parts)}" for n in range(1, len(parts) + 1)] if len(parts) > 1 else [name]
    compiled.recursively_apply_fns(
        [
            partial(put_in_front, inputs=part.input_index_mapping, results=part.output_index_mapping, name=name)
            for part, name in zip(parts, names, strict=True)
        ]
    )
    return True


@contextlib.contextmanager
def verdicts_noted(say: Callable[[str], None], facts: Facts, options: Options) -> Iterator[Callable[[Any], None]]:
    """Say of the graph that is compiled inside whether it is replayed, and again when that is decided.

    What it gives is told of the compiled graph.
    """
    before = set(all_programs())

    def note(compiled: Any) -> None:
        made = [one for one in all_programs() if one not in before]
        if options.replays == "off":
            say("not replayed: cuda_graphs is off")
        elif facts.reason:
            say(f"not replayed: {facts.reason}")
        elif reason := getattr(compiled, "disabled_cudagraphs_reason", None):
            say(f"not replayed: {str(reason).splitlines()[0]}")
        elif not made:
            say("not replayed: nothing of it can be recorded")
        else:
            parts = f", in {len(made)} parts" if len(made) > 1 else ""
            say("replayed" + parts + ("" if options.replays == "on" else " if the clock says so, after some calls"))
            for one in made:
                one.tell = say

    yield note


def name_of(compiled: Any) -> str:
    facts = compiled.fx_kwargs
    return "a backward" if facts["is_backward"] else "inference" if facts["is_inference"] else "a forward"
