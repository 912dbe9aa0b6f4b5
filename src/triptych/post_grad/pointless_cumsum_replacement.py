"""`pointless_cumsum_replacement`: computes a cumulative sum of ones by counting, without a scan."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.facts import known
from ..match.pattern import Int
from ..rewrite.examples import declines, fires
from ..rewrite.rule import FirstOf, Rule

COUNTED_TO = {
    torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8,
    torch.int8: 2**7 - 1, torch.uint8: 2**8 - 1, torch.int16: 2**15 - 1,
}  # fmt: skip
"""Up to this number each sum is exact, in whatever order and width the scan adds. Beyond it narrow integers wrap, and
code that Inductor generates for a count keeps them wide."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}


class PointlessCumsumReplacement(Rule):
    """cumsum(full(shape, 1), dim) -> arange(1, size + 1), expanded to the shape

    The rule declines if a sum could be rounded or wrap, whatever the width in which a device adds: a scan in bfloat16
    cannot count beyond 256.
    """

    def pattern(self, op, size, one, dim: Int, dtype, own_dtype, layout, device, pin_memory):
        ones = op.full(size, one, dtype=own_dtype, layout=layout, device=device, pin_memory=pin_memory)
        return op.cumsum(ones, dim, dtype=dtype)

    def check(self, m, one, dim):
        m.applies(m.root.known and isinstance(one, (bool, int, float)) and one == 1)
        counts = m.root.dtype
        m.applies(not counts.is_complex and counts != torch.bool)
        m.applies(counts in COUNTED_TO or not counts.is_floating_point)
        if m.root.rank and counts in COUNTED_TO:
            most, length = COUNTED_TO[counts], m.root.shape[dim]
            m.require(known(length <= most), "a sum beyond {wanted} is rounded or wraps", wanted=most, found=length)

    def rewrite(self, op, m, dim):
        root = m.root
        if not root.rank:
            return op.full([], 1, dtype=root.dtype, device=root.device)
        length = root.shape[dim]

        def counted() -> Any:
            how = {"dtype": torch.int64, "device": root.device, "requires_grad": False}
            count = op.call(torch.ops.prims.iota.default, length, start=1, step=1, **how)
            if root.dtype != torch.int64:
                count = op.to(count, dtype=root.dtype)
            if root.rank == 1:
                return count
            along = op.reshape(count, [length if d == dim else 1 for d in range(root.rank)])
            return op.expand(along, list(root.shape))

        return FirstOf(counted, lambda: op.clone(counted(), memory_format=torch.contiguous_format))

    examples = [
        fires(lambda x: torch.ones(4, 5).cumsum(1) + x, "f32[4, 5]", **ATEN),
        fires(lambda x: (torch.ones(4, 5).cumsum(-2), x * 2), "f32[4, 5]", **ATEN),
        fires(lambda x: torch.cumsum(torch.full((5,), True), 0) + x, "f32[5]", **ATEN),
        fires(lambda x: torch.ones(100, dtype=torch.bool).cumsum(0, dtype=torch.int8) + x, "i64[100]", **ATEN),
        fires(lambda x: torch.ones(5, dtype=torch.int32).cumsum(0, dtype=torch.float16) + x, "f16[5]", **ATEN),
        fires(lambda x: torch.ones(()).cumsum(0) + x, "f32[3]", **ATEN),
        fires(lambda x: torch.ones(0, 3).cumsum(0), "f32[3]", **ATEN),
        fires(lambda x: torch.ones(3, 0).cumsum(0) + x, "f32[1]", **ATEN),
        fires(lambda x: torch.ones(x.shape, dtype=torch.int64).cumsum(1) + x, "i64[4, 5]", dynamic=True, **ATEN),
        declines(lambda x: torch.full((4, 5), 2.0).cumsum(1) + x, "f32[4, 5]", **ATEN),
        declines(lambda x: torch.ones(300, dtype=torch.bfloat16).cumsum(0) + x, "bf16[300]", because="beyond 256",
                 **ATEN),
        declines(lambda x: torch.ones(300, dtype=torch.bool).cumsum(0, dtype=torch.int8) + x, "i64[300]",
                 because="or wraps", **ATEN),
        declines(lambda x: torch.ones(x.shape).cumsum(1) + x, "f32[4, 5]", dynamic=True, because="is rounded", **ATEN),
        declines(lambda x: (y := torch.ones(4), y.cumsum(0) + x), "f32[4]", because="outside the pattern", **ATEN),
        declines(lambda x: torch.ones(4).cumprod(0) + x, "f32[4]", **ATEN),
    ]  # fmt: skip
