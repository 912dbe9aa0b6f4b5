"""Numbers of the backend's counter-based generator: seeds, and 32-bit draws by a seed in the shape of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Value
from ..rewrite.edits import Edit, Resize, SetArguments
from ..rewrite.emit import Emitter

CHECKPOINT_TAGS = ("recompute", "ac_graph_id")
"""The tags of nodes in a checkpointed region, which is recomputed in the backward. The load of seeds must not have
them: the recomputation uses the seeds of the forward."""


class Source:
    """The source of random numbers for one rewrite. It takes one seed from the load of seeds of its device, which is
    enlarged by one."""

    def __init__(self, op: Emitter) -> None:
        self.op = op
        self.prims = _private.generator_prims
        self.edits: list[Edit] = []
        """The edits elsewhere in the graph that taking the seed needs."""

    def seed(self, like: Any) -> Value:
        """The next seed on the device of `like`, which is a fact, or a node whose fact is not known."""
        seeds = self._loaded(like)
        if seeds is None:
            # by a separate emitter: an unused draw is erased, but its seed stays taken
            at = self.op.at(self.op.anchor, "load_seeds")
            device = like.device if isinstance(like, torch.Tensor) else at.call(getattr, like, "device").node
            seeds = at.call(self.prims.seeds, 1, device).node
            for tag in CHECKPOINT_TAGS:
                seeds.meta.pop(tag, None)
            return self.op.call(self.prims.lookup_seed, seeds, 0)
        # the edits below load one more seed and select it
        loaded = tensor_fact(seeds)
        value = None if loaded is None else self.op.program.fact_memo.in_shape(loaded, [])
        seed = self.op.call_returning(value, self.prims.lookup_seed, seeds, 0)
        count: Any = seeds.args[0]
        more = count + 1
        self.edits += [Resize(seeds, (more, seeds.args[1]), [more]), SetArguments(seed.node, (seeds, count))]
        return seed

    def _loaded(self, like: Any) -> Node | None:
        """The load of seeds on the device of `like`, if there is one before this draw."""
        for node in self.op.program.graph.find_nodes(op="call_function", target=self.prims.seeds):
            device = node.args[1]
            if isinstance(like, torch.Tensor):
                same = device == like.device
            else:
                same = isinstance(device, Node) and device.target is getattr and device.args[0] is like
            if same and node < self.op.anchor:
                return node
        return None

    def floats(self, like: Any, mode: str) -> Value:
        """32-bit floats with the shape and layout of `like`."""
        seed = self.seed(like)
        if not isinstance(like, torch.Tensor):
            return self.op.call(self.prims.random, self.op.call(getattr, like, "shape"), seed, mode)
        order = memory_order(like)
        if order is None:
            return self.op.call(self.prims.random, list(like.shape), seed, mode)
        dense = self.op.call(self.prims.random, [like.shape[d] for d in order], seed, mode)
        return self.op.permute(dense, [order.index(d) for d in range(len(order))])

    def integers(self, like: torch.Tensor, low: Any, high: Any) -> Value:
        """64-bit integers in [low, high), with the shape and layout of `like`."""
        order = memory_order(like) or list(range(like.dim()))
        seed = self.seed(like)
        value = self.op.call(self.prims.randint, low, high, [like.shape[d] for d in order], seed)
        if order != sorted(order):
            value = self.op.permute(value, [order.index(d) for d in range(len(order))])
        return value


def memory_order(value: torch.Tensor) -> list[int] | None:
    """The dims of a dense tensor from the largest stride to the smallest; None if the tensor is contiguous, or not
    dense."""
    left, order = list(range(value.dim())), list[int]()
    expected: Any = 1
    while left:
        fits = (d for d in reversed(left) if known(value.shape[d] == 1) or known_equal(value.stride(d), expected))
        if (dim := next(fits, None)) is None:
            return None
        left.remove(dim)
        order.insert(0, dim)
        expected = expected * value.shape[dim]
    return None if order == sorted(order) else order
