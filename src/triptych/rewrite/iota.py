"""0, 1, 2, ... in both dialects."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.program import ATEN, Value
from .emit import Emitter


def iota(op: Emitter, length: Any, device: torch.device) -> Value:
    """Integers from zero on: in an ATen graph by the operation that code generators know."""
    if op.program.dialect != ATEN:
        return op.arange(length, device=device)
    how = {"start": 0, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
    return op.call(torch.ops.prims.iota.default, length, **how)
