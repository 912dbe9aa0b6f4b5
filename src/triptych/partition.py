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
from .ir.facts import POLICY, fact, gives_symbols

LEAST_BUDGET = 1e-9
"""For memory that activations may take: at 0 the partitioner keeps nothing but inputs, whatever the policies say."""


def partition(joint: GraphModule, inputs: Sequence[Any], **facts: Any) -> tuple[GraphModule, GraphModule]:
    """Forward and backward. What the backward needs of random draws it gets from the forward, or computes from the
    forward's seeds: drawn again they would be other numbers, and the gradient that of another function."""
    draws = keep_draws(joint)
    config = _private.functorch_config
    with contextlib.ExitStack() as stack:
        if draws and config.activation_memory_budget < 1:
            # draws of several results cannot be marked: with those the partitioner must not look for more memory
            whole = all(isinstance(fact(n), torch.Tensor) for n in draws)
            least = max(config.activation_memory_budget, LEAST_BUDGET) if whole else 1.0
            stack.enter_context(config.patch(activation_memory_budget=least))
        if sum(map(gives_symbols, joint.graph.nodes)) > 1:
            # the partitioner merges equal operands of these, and then one symbol stands for what others call by two
            stack.enter_context(config.patch(cse=False))
        halves = _private.min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **facts)
    forward, backward = (_put_off_python(gm) for gm in halves)
    return forward, backward


def _put_off_python(gm: GraphModule) -> GraphModule:
    """The graph as a module that generates its Python when that is first read, not after each stage that changes it.
    The partitioner's forward is one, its backward is not."""
    lazy = _private.LazyGraphModule.from_graphmodule(gm)
    lazy.meta.update(gm.meta)
    return lazy


def keep_draws(joint: GraphModule) -> list[Node]:
    """Mark the draws of a graph to be kept; those of a checkpointed region, which has a way of its own, stay as they
    are."""
    draws = [n for n in joint.graph.nodes if n.op == "call_function" and effects(n).random]
    for node in draws:
        if isinstance(fact(node), torch.Tensor):
            node.meta.setdefault(POLICY, CheckpointPolicy.MUST_SAVE)
    return draws
