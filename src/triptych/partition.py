"""Partitions a joint graph by PyTorch's partitioner, which is told what must not be recomputed."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import _private
from .ir.effects import effects
from .ir.facts import POLICY, fact, gives_symbols, storage

LEAST_BUDGET = 1e-9
"""The least activation memory budget: at 0 the partitioner saves nothing but inputs, whatever the policies say."""


def partition(joint: GraphModule, inputs: Sequence[Any], **facts: Any) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph. Random numbers that the backward needs are saved by the forward, or computed
    from the forward's seeds: if they were drawn again, they would differ, and the gradient would be that of another
    function."""
    draws = keep_draws(joint)
    config = _private.functorch_config
    with contextlib.ExitStack() as stack:
        if draws and config.activation_memory_budget < 1:
            # draws with several results cannot be marked: with those, the partitioner must not recompute to save memory
            whole = all(isinstance(fact(n), torch.Tensor) for n in draws)
            least = max(config.activation_memory_budget, LEAST_BUDGET) if whole else 1.0
            stack.enter_context(config.patch(activation_memory_budget=least))
        # The partitioner merges equal values. Of equal operands of nodes that give symbols, one symbol would then stand
        # for what others call by two; and results of two equal operators that are both returned would share memory.
        if sum(map(gives_symbols, joint.graph.nodes)) > 1 or _returns_like_results(joint, facts["num_fwd_outputs"]):
            stack.enter_context(config.patch(cse=False))
        halves = _private.min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **facts)
    forward, backward = (_put_off_python(gm) for gm in halves)
    return forward, backward


def _returns_like_results(joint: GraphModule, outputs: int) -> bool:
    """Does the forward return results of two calls of one operator that has several results? The partitioner does not
    merge values that are returned, but it merges such calls, of which it does not see that their results are."""
    returned: Any = joint.graph.output_node().args[0]
    places = {storage(fact(n)) for n in returned[:outputs] if isinstance(n, Node)} - {None}
    results = (n for n in joint.graph.nodes if n.target is operator.getitem and storage(fact(n)) in places)
    calls = {call: None for n in results if isinstance(call := n.args[0], Node)}
    return len({call.target for call in calls}) < len(calls)


def _put_off_python(gm: GraphModule) -> GraphModule:
    """The graph as a module that generates its Python when that is first read, not after each stage that changes it.
    The partitioner's forward is one, its backward is not."""
    lazy = _private.LazyGraphModule.from_graphmodule(gm)
    lazy.meta.update(gm.meta)
    return lazy


def keep_draws(joint: GraphModule) -> list[Node]:
    """Mark the random draws of a graph as values to save, except those of a checkpointed region, which has its own
    policy."""
    draws = [n for n in joint.graph.nodes if n.op == "call_function" and effects(n).random]
    for node in draws:
        if isinstance(fact(node), torch.Tensor):
            node.meta.setdefault(POLICY, CheckpointPolicy.MUST_SAVE)
    return draws
