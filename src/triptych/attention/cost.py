"""Whether the kernel for an explicit mask is faster than the products and the softmax as they were written.

Without a mask, or with a causal mask that the kernel computes itself, nothing of the size of the scores is read or
written, and the kernel is always faster. With a mask tensor, a GPU has to use a slower kernel, which costs most in the
backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..cost import can_measure, device_model, measured, size_hint
from ..cost.timing import Work
from ..ir.facts import tensor_of
from ..rewrite.rule import Match
from .plan import AttentionPlan

FORWARD_RATE, BACKWARD_RATE = 0.3, 0.2
"""The fraction of the GEMM rate that the kernel for an explicit mask reaches."""

BACKWARD_WORK = 2.5
"""How many products the kernel's backward computes for each one of its forward: it recomputes the scores."""

BLOCK_ROWS, BLOCK_SECONDS = 64, 4e-6
"""The kernel works on blocks of this many queries of one head, and a core needs at least this long for each, however
few keys there are. In windows of 49 pixels (Swin) this minimum is most of the time on an H200."""


def require_quicker(m: Match, plan: AttentionPlan) -> None:
    """Leave an attention with an explicit mask as it is on a GPU where its kernel is slower."""
    device = plan.query.device
    if plan.attn_mask is None or device is None or device.type != "cuda":
        return
    site = _Site.of(plan)
    m.pays(*site.modelled(), measure=site.timed)


@dataclass(frozen=True)
class _Site:
    """Everything that the time of an attention depends on."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...]
    mask_strides: tuple[int, ...]
    mask_dtype: torch.dtype
    mask_bytes: int
    dtype: torch.dtype
    device: torch.device
    dropout: float
    trains: bool
    mask_trains: bool

    @classmethod
    def of(cls, plan: AttentionPlan) -> _Site:
        assert plan.attn_mask is not None
        q, k, v, mask = (tensor_of(x.node) for x in (plan.query, plan.key, plan.value, plan.attn_mask))
        shape, strides = _numbers(mask.shape), _numbers(mask.stride())
        trains = plan.draft.program.is_training
        return cls(
            query=_numbers(q.shape),
            key=_numbers(k.shape),
            value=_numbers(v.shape),
            mask=shape,
            mask_strides=strides,
            mask_dtype=mask.dtype,
            mask_bytes=math.prod(size for size, stride in zip(shape, strides) if stride) * mask.dtype.itemsize,
            dtype=q.dtype,
            device=q.device,
            dropout=plan.dropout,
            trains=trains,
            mask_trains=trains and plan.draft.wants_gradient(plan.attn_mask),
        )

    @property
    def batch(self) -> int:
        return math.prod(self.query[:-2])

    @property
    def score_bytes(self) -> int:
        return self.batch * self.query[-2] * self.key[-2] * self.dtype.itemsize

    def modelled(self) -> tuple[float, float]:
        """Seconds of the products with a softmax between them, and of the kernel."""
        model = device_model(self.device)
        (rows, width), keys, columns = self.query[-2:], self.key[-2], self.value[-1]

        def gemm(m: int, n: int, k: int) -> float:
            return model.gemm(m, n, k, self.dtype, self.batch)

        before = gemm(rows, keys, width) + gemm(rows, columns, keys)
        before += model.copy(2 * self.score_bytes + self.mask_bytes)
        work = 2.0 * self.batch * rows * keys * (width + columns) / model.flops(self.dtype)
        blocks = self.batch * math.ceil(rows / BLOCK_ROWS)
        least = BLOCK_SECONDS * max(1.0, blocks / model.cores)
        after = model.launch + max(work / FORWARD_RATE, least)
        if self.trains:
            before += gemm(rows, keys, columns) + gemm(keys, columns, rows) + model.copy(3 * self.score_bytes)
            before += gemm(rows, width, keys) + gemm(keys, width, rows)
            after += model.launch + BACKWARD_WORK * max(work / BACKWARD_RATE, least)
        return before, after

    def timed(self) -> tuple[float, float] | None:
        """The same, timed on the device; None where that is not possible."""
        if not can_measure(self.device, 6 * self.score_bytes + self.mask_bytes):
            return None
        sizes = f"{self.query} {self.key} {self.value} {self.dtype} training={self.trains}"
        mask = f"{self.mask} {self.mask_strides} {self.mask_dtype} gradient={self.mask_trains} dropout={self.dropout}"
        before = measured(f"attention apart {sizes}", self.device, self._apart)
        after = measured(f"attention fused {sizes} mask {mask}", self.device, self._fused)
        if before is None or after is None:
            return None
        return before + self.mask_bytes / device_model(self.device).bandwidth, after

    def _operands(self) -> list[torch.Tensor]:
        shapes = (self.query, self.key, self.value)
        return [torch.randn(shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def _apart(self) -> Work:
        """The attention without fusion, as it is compiled: two products, and one kernel for everything between them."""
        q, k, v = self._operands()

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            p = torch.softmax(q @ k.mT, -1)
            return p, p @ v

        def step() -> None:
            p, result = forward()
            grad = torch.ops.aten._softmax_backward_data(result @ v.mT, p, -1, p.dtype)
            p.mT @ result, grad @ k, grad.mT @ q

        return step if self.trains else forward

    def _fused(self) -> Work:
        q, k, v = (t.requires_grad_(self.trains) for t in self._operands())
        held = 1 + sum((size - 1) * stride for size, stride in zip(self.mask, self.mask_strides))
        nothing = torch.ones if self.mask_dtype == torch.bool else torch.zeros  # masks nothing
        mask = nothing(held, dtype=self.mask_dtype, device=self.device).as_strided(self.mask, self.mask_strides)
        mask.requires_grad_(self.mask_trains)
        wanted = [q, k, v, mask] if self.mask_trains else [q, k, v]

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, self.dropout)

        def step() -> None:
            with torch.enable_grad():
                result = forward()
                torch.autograd.grad(result, wanted, result.detach())

        return step if self.trains else forward


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(size_hint, sizes))
