"""`fused_int_mm_mul`: a product of int8 matrices and the scale behind it."""

from __future__ import annotations

from typing import Any

import torch

from ..match.pattern import Tensor
from ..rewrite.examples import declines
from ..rewrite.rule import Rule

REASON = (
    "torch has no operator that multiplies int8 matrices and scales the result; the kernel that `mode='max-autotune'` "
    "generates for the product scales it"
)
ATEN: dict[str, Any] = {"dialects": ("aten",)}


class FusedIntMmMul(Rule):
    """to(_int_mm(a, b), dtype) * scale stays as it is, for want of an operator that does both

    The int32 product is written and read once more, unless a generated kernel computes it: code generation then makes
    the scale part of that kernel by itself. Scaling an operand before the product is no way out, for it is an integer.
    """

    only_explains = True
    mixed_dtypes = True
    interior_may_be_used = True

    def pattern(self, op, a: Tensor, b: Tensor, scale, dtype):
        product = op._int_mm(a, b)
        return op.mul(op.optional("to", product, dtype=dtype), scale)

    def check(self, m):
        m.require(m.program.options.mode in ("max-autotune", "max-autotune-no-cudagraphs"), REASON)
        m.applies(False)

    examples = [
        declines(lambda a, b, s: torch.ops.aten._int_mm(a, b) * s, torch.ones(32, 16, dtype=torch.int8),
                 torch.ones(16, 8, dtype=torch.int8), "f32[8]", because="no operator", **ATEN),
        declines(lambda a, b, s: torch.ops.aten._int_mm(a, b).float() * s, torch.ones(32, 16, dtype=torch.int8),
                 torch.ones(16, 8, dtype=torch.int8), "f32[8]", because="no operator", **ATEN),
        declines(lambda a, b, s: torch.ops.aten._int_mm(a, b) * s, torch.ones(32, 16, dtype=torch.int8),
                 torch.ones(16, 8, dtype=torch.int8), "f32[8]", options={"mode": "max-autotune"}, **ATEN),
        declines(lambda a, b, s: (a @ b) * s, "f32[4, 8]", "f32[8, 8]", "f32[8]", **ATEN),
    ]  # fmt: skip
