"""Which inputs of the graph that AOTAutograd makes of a captured one are weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..ir.weights import FIXED, is_weight


class WeightInputs:
    """AOTAutograd tells of each of its inputs what it was: an input of the captured graph, by place, or a parameter or
    buffer of its module."""

    def __init__(self, captured: GraphModule) -> None:
        self.captured = captured
        self.inputs = [n for n in captured.graph.nodes if n.op == "placeholder"]

    def is_weight(self, node: Node) -> bool:
        if FIXED in node.meta:  # computed from weights, once
            return True
        origin = node.meta.get("desc")
        if isinstance(origin, _private.PlainAOTInput):
            return is_weight(self.inputs[origin.idx])
        return isinstance(origin, (_private.ParamAOTInput, _private.BufferAOTInput))

    def is_inference_tensor(self, node: Node) -> bool:
        """Such a tensor does not count the writes to it. Its fake value does not tell, the tensor itself does."""
        tensor = self._tensor(node.meta.get("desc"))
        return isinstance(tensor, torch.Tensor) and tensor.is_inference()

    def _tensor(self, origin: Any) -> Any:
        if origin is None:
            return None
        if isinstance(origin, _private.PlainAOTInput):
            return getattr(self.inputs[origin.idx].meta.get("grapharg"), "example", None)
        owner, _, name = origin.target.rpartition(".")
        return getattr(self.captured.get_submodule(owner), name, None)
