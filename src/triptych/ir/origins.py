"""Where the inputs of a graph come from: which are weights, and which of the user's tensors they are."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from .weights import FIXED, is_weight


class Origins:
    """The inputs of a captured graph, and those of the graphs that AOTAutograd builds from it.

    AOTAutograd records the origin of each of its inputs: an input of the captured graph, by index, or a parameter or
    buffer of its module.
    """

    def __init__(self, captured: GraphModule) -> None:
        self.captured = captured
        self.inputs = [n for n in captured.graph.nodes if n.op == "placeholder"]

    def is_weight(self, node: Node) -> bool:
        if FIXED in node.meta:  # a weight, or computed from weights once
            return True
        origin = node.meta.get("desc")
        if isinstance(origin, _private.PlainAOTInput):
            return is_weight(self.inputs[origin.idx])
        return isinstance(origin, (_private.ParamAOTInput, _private.BufferAOTInput))

    def tensor(self, node: Node) -> torch.Tensor | None:
        """The real tensor that the program was captured with; the fake value only has its metadata."""
        origin = node.meta.get("desc")
        if isinstance(origin, _private.PlainAOTInput):
            return given_tensor(self.inputs[origin.idx])
        if isinstance(origin, (_private.ParamAOTInput, _private.BufferAOTInput)):
            owner, _, name = origin.target.rpartition(".")
            return _real(getattr(self.captured.get_submodule(owner), name, None))
        return given_tensor(node)


def given_tensor(node: Node) -> torch.Tensor | None:
    """The real tensor with which Dynamo captured an input; Dynamo drops it once the program is compiled."""
    with contextlib.suppress(Exception):
        return _real(node.meta["grapharg"].example)
    return None


def _real(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) and not isinstance(value, _private.FakeTensor) else None
