"""A joint graph in two: PyTorch's partitioner, told what must not be computed twice."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import _private
from .ir.effects import effects
from .ir.facts import fact, is_tangent
from .kept_masks import compute_masks_again

POLICY = "recompute"
"""Where the partitioner looks for a node's policy."""

COPY = torch.ops.aten.copy_.default
"""The write of an input, as AOTAutograd puts it at the end of the forward."""

LEAST_BUDGET = 1e-9
"""For memory that activations may take: at 0 the partitioner keeps nothing but inputs, whatever the policies say."""


def partition(joint: GraphModule, inputs: Sequence[Any], **facts: Any) -> tuple[GraphModule, GraphModule]:
    """Forward and backward. What the backward needs of random draws it gets from the forward, or computes from the
    forward's seeds: drawn again they would be other numbers, and the gradient that of another function."""
    draws = keep_draws(joint)
    keep_overwritten(joint)
    config = _private.functorch_config
    with contextlib.ExitStack() as stack:
        if draws and config.activation_memory_budget < 1:
            # draws of several results cannot be marked: with those the partitioner must not look for more memory
            whole = all(isinstance(fact(n), torch.Tensor) for n in draws)
            least = max(config.activation_memory_budget, LEAST_BUDGET) if whole else 1.0
            stack.enter_context(config.patch(activation_memory_budget=least))
        forward, backward = _private.min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **facts)
    compute_masks_again(forward, backward, facts["num_fwd_outputs"])
    return forward, backward


def keep_draws(joint: GraphModule) -> list[Node]:
    """Mark the draws of a graph to be kept; those of a checkpointed region, which has a way of its own, stay as they
    are."""
    draws = [n for n in joint.graph.nodes if n.op == "call_function" and effects(n).random]
    for node in draws:
        if isinstance(fact(node), torch.Tensor):
            node.meta.setdefault(POLICY, CheckpointPolicy.MUST_SAVE)
    return draws


def keep_overwritten(joint: GraphModule) -> None:
    """What the backward needs of an input that the forward writes is what it held before: computed again from the
    input, or read from it, it would be what was written."""
    graph = joint.graph
    writes = [n for n in graph.nodes if n.target is COPY and n.args[0].op == "placeholder"]
    if not writes:
        return
    late: set[Node] = set()
    """What is computed from the gradients that come in."""
    for node in graph.nodes:
        if is_tangent(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in late or not needed.isdisjoint(node.users):
            needed.add(node)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for write in writes:
        source = write.args[0]
        readers = [u for u in source.users if u is not write]
        if write in late or needed.isdisjoint(readers):
            continue
        with graph.inserting_before(first):
            before = graph.call_function(torch.ops.aten.clone.default, (source,))
        before.meta = {"val": fact(source).clone(), POLICY: CheckpointPolicy.MUST_SAVE}
        for reader in readers:
            reader.replace_input_with(source, before)
