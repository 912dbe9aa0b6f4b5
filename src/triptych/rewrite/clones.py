"""Clones with a given memory layout."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.facts import same_layout, tensor_fact
from ..ir.program import Value
from ..ir.sizes import size_hint
from .emit import Emitter


def copied(op: Emitter, value: Any, like: torch.Tensor | None) -> Any:
    """A clone with the layout that `cat` and `stack` give: that of `like` if the value has it too, else contiguous."""
    known = tensor_fact(getattr(value, "node", value))
    if known is not None and like is not None and same_layout(known, like):
        return op.clone(value)
    return op.clone(value, memory_format=torch.contiguous_format)


def copied_as(op: Emitter, value: Value, like: torch.Tensor) -> Value:
    """A dense clone whose dims are in the same order in memory as those of `like`."""
    dims = sorted(range(like.dim()), key=lambda d: (-size_hint(like.stride(d)), d))
    in_order = op.permute(value, dims) if dims != sorted(dims) else value
    copy = op.clone(in_order, memory_format=torch.contiguous_format)
    return copy if in_order is value else op.permute(copy, [dims.index(d) for d in range(like.dim())])
