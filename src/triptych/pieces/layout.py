"""Copies that lie in memory as a concatenation lays them out."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.facts import same_layout, tensor_fact
from ..rewrite.emit import Emitter


def copied(op: Emitter, value: Any, like: torch.Tensor | None) -> Any:
    """The value in new memory, laid out as `cat` and `stack` do it: as the operands lie, or contiguous."""
    known = tensor_fact(getattr(value, "node", value))
    if known is not None and like is not None and same_layout(known, like):
        return op.clone(value)
    return op.clone(value, memory_format=torch.contiguous_format)
