"""Whether the kernel for an attention is faster than the products and the softmax as they were written.

On a GPU it mostly is, without a mask or with a causal mask that the kernel computes itself: nothing of the size of the
scores is read or written. With a mask tensor a slower kernel has to be used, which costs most in the backward. In
float32 only a measurement can tell, and where there are few keys and many heads, the overhead of a kernel counts most.

A CPU has one kernel for all masks. It computes in float32, whatever the dtype, one head after the other, and its
backward computes the scores again. That pays where the scores do not fit into the cache. On a CPU with instructions for
bfloat16, products in bfloat16 are up to five times as fast as the kernel, so that there only a measurement can tell.
With dropout, or if the mask needs a gradient, a CPU has no kernel: torch computes products and a softmax, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..cost import can_measure, device_model, measured_in_turns, size_hint
from ..cost.decision import Decision
from ..cost.device import HALF, precision_of_products
from ..cost.parts import MODEL_ERROR
from ..cost.timing import Run as Work
from ..ir.facts import tensor_of
from ..rewrite.rule import Match
from .kernel import NO_KERNEL
from .plan import AttentionPlan

FORWARD_RATE, BACKWARD_RATE = 0.3, 0.2
"""The fraction of the GEMM rate that the kernel for an explicit mask reaches."""
FLASH_FORWARD_RATE, FLASH_BACKWARD_RATE, FLASH_WIDTH = 0.5, 0.35, 256
"""The same of the kernel for half precision without a mask, which takes heads of up to this size. On an H200 the
forward of four sequences of 2048 with 16 heads of 64 takes 0.16 ms; the rate of the backward is an estimate."""
SINGLE_RATE = 1.0
"""The same of the kernel for float32 without a mask: an estimate, which decides only where nothing may be measured."""

BACKWARD_WORK = 2.5
"""How many products the kernel's backward computes for each one of its forward: it recomputes the scores."""

BLOCK_ROWS, BLOCK_SECONDS = 64, 4e-6
"""The kernel works on blocks of this many queries of one head, and a core needs at least this long for each, however
few keys there are. In windows of 49 pixels (Swin) this minimum is most of the time on an H200."""
FLASH_BLOCK_SECONDS = 1e-6
"""The same of the kernel for half precision without a mask, estimated from its larger blocks."""

TOO_SHORT = 30e-6
"""On a GPU, an attention without a mask that takes less than this is fused: the launches are most of it."""
MUCH_MEMORY = 64 << 20
"""The kernel may be a little slower if this many bytes of scores are saved: on a CPU, and on a GPU without a mask."""


CPU_CACHE = 1 << 20
"""Scores of up to this many bytes stay in the cache of a core between the operations that write and read them."""
CPU_TRAFFIC = 4e9
"""Bytes of scores beyond the cache that a core moves in a second, from the first product to the second."""
CPU_BACKWARD_TRAFFIC = 4
"""How many times the bytes of the forward a training step moves, which keeps the probabilities for its backward."""
CPU_HEAD = 1e-6
"""Seconds that the kernel needs for each head besides its arithmetic. The four numbers are fitted to float32 on one
core of an EPYC with AVX-512: 8 to 1024 queries, 1 to 96 heads."""
CPU_NAN_ROWS, CPU_KEY = 40e9, 0.4e-9
"""Bytes of queries and results that a core moves in a second in `nan_rows`, and the seconds that it needs for each
number of the keys, of which the kernel finds the lowest and the highest; both fitted likewise."""
CPU_TOO_SHORT = 50e-6
"""An attention that takes less than this is fused, even if the kernel may take some microseconds longer."""
CPU_TOO_LONG = 0.25
"""An attention that takes longer than this many seconds is not measured."""


def require_quicker(m: Match, plan: AttentionPlan) -> None:
    """Leave an attention as it is where its kernel is slower."""
    device = plan.query.device
    if device is None:
        return
    if device.type == "cuda":
        site = _Site.of(plan)
        before, after = site.modelled()
        if site.mask is not None:
            m.pays(before, after, measure=site.timed)
        elif before <= TOO_SHORT:
            m.accept(Decision(before, after, negligible=True))
        else:
            error = MODEL_ERROR if site.has_flash_kernel else math.inf
            m.pays(before, after, measure=site.timed, error=error, saves=site.much_saved)
    if device.type == "cpu":
        site = _Site.of(plan)
        before, after = site.modelled_on_cpu()
        if before <= CPU_TOO_SHORT:
            m.accept(Decision(before, after, negligible=True))
        else:
            m.require(plan.may_have_kernel, NO_KERNEL)
            timed = site.timed if before < CPU_TOO_LONG else None
            error = math.inf if site.dtype in HALF else MODEL_ERROR
            m.pays(before, after, measure=timed, error=error, saves=site.much_saved)


@dataclass(frozen=True)
class _Site:
    """Everything that the time of an attention depends on."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None
    mask_strides: tuple[int, ...]
    mask_dtype: torch.dtype | None
    mask_bytes: int
    is_causal: bool
    dtype: torch.dtype
    device: torch.device
    dropout: float
    trains: bool
    mask_trains: bool

    @classmethod
    def of(cls, plan: AttentionPlan) -> _Site:
        q, k, v = (tensor_of(x.node) for x in (plan.query, plan.key, plan.value))
        mask = None if plan.attn_mask is None else tensor_of(plan.attn_mask.node)
        shape, strides = ((), ()) if mask is None else (_numbers(mask.shape), _numbers(mask.stride()))
        elements = math.prod(size for size, stride in zip(shape, strides) if stride)
        trains = plan.draft.program.is_training
        return cls(
            query=_numbers(q.shape),
            key=_numbers(k.shape),
            value=_numbers(v.shape),
            mask=None if mask is None else shape,
            mask_strides=strides,
            mask_dtype=None if mask is None else mask.dtype,
            mask_bytes=0 if mask is None else elements * mask.dtype.itemsize,
            is_causal=plan.is_causal,
            dtype=plan.dtype,
            device=q.device,
            dropout=plan.dropout,
            trains=trains,
            mask_trains=trains and plan.attn_mask is not None and plan.draft.wants_gradient(plan.attn_mask),
        )

    @property
    def batch(self) -> int:
        return math.prod(self.query[:-2])

    @property
    def score_bytes(self) -> int:
        return self.batch * self.query[-2] * self.key[-2] * self.dtype.itemsize

    @property
    def much_saved(self) -> int:
        """The bytes of the scores, if they are many."""
        return self.score_bytes if self.score_bytes >= MUCH_MEMORY else 0

    @property
    def has_flash_kernel(self) -> bool:
        widest = max(self.query[-1], self.value[-1])
        return self.mask is None and self.dtype in HALF and widest <= FLASH_WIDTH

    @property
    def _rates(self) -> tuple[float, float, float]:
        """The fractions of the GEMM rate that the kernel on a GPU reaches, and the seconds of its smallest block."""
        if self.has_flash_kernel:
            return FLASH_FORWARD_RATE, FLASH_BACKWARD_RATE, FLASH_BLOCK_SECONDS
        if self.mask is None and self.dtype not in HALF:
            return SINGLE_RATE, SINGLE_RATE, BLOCK_SECONDS
        return FORWARD_RATE, BACKWARD_RATE, BLOCK_SECONDS

    def modelled(self) -> tuple[float, float]:
        """Seconds of the products with a softmax between them, and of the kernel."""
        model = device_model(self.device)
        (rows, width), keys, columns = self.query[-2:], self.key[-2], self.value[-1]

        def gemm(m: int, n: int, k: int) -> float:
            return model.gemm(m, n, k, self.dtype, self.batch)

        before = gemm(rows, keys, width) + gemm(rows, columns, keys)
        before += model.copy(2 * self.score_bytes + self.mask_bytes)
        work = 2.0 * self.batch * rows * keys * (width + columns) / model.flops(self.dtype)
        if self.is_causal and self.mask is None:
            work /= 2  # the kernel leaves out blocks that are masked
        forward, backward, block = self._rates
        least = block * max(1.0, self.batch * math.ceil(rows / BLOCK_ROWS) / model.cores)
        after = model.launch + max(work / forward, least)
        if self.trains:
            before += gemm(rows, keys, columns) + gemm(keys, columns, rows) + model.copy(3 * self.score_bytes)
            before += gemm(rows, width, keys) + gemm(keys, width, rows)
            after += model.launch + BACKWARD_WORK * max(work / backward, least)
        return before, after

    def modelled_on_cpu(self) -> tuple[float, float]:
        """The same on a CPU."""
        model = device_model(self.device)
        (rows, width), keys, columns = self.query[-2:], self.key[-2], self.value[-1]
        cores = torch.get_num_threads()

        def gemm(m: int, n: int, k: int) -> float:
            return model.gemm(m, n, k, torch.float32, self.batch)

        moved = self.mask_bytes / model.bandwidth + max(0, self.score_bytes - CPU_CACHE) / (CPU_TRAFFIC * cores)
        heads = CPU_HEAD * self.batch / cores
        before = after = gemm(rows, keys, width) + gemm(rows, columns, keys)
        if self.trains:
            backward = gemm(rows, keys, columns) + gemm(keys, columns, rows)
            backward += gemm(rows, width, keys) + gemm(keys, width, rows)
            before += backward + CPU_BACKWARD_TRAFFIC * moved
            after += backward + gemm(rows, keys, width) + heads
        return before + moved, after + heads + self.nan_rows

    @property
    def nan_rows(self) -> float:
        """Seconds of the operations that set rows to NaN behind a kernel on a CPU."""
        if self.device.type != "cpu":
            return 0.0
        (rows, width), keys, columns = self.query[-2:], self.key[-2], self.value[-1]
        results = 4 if self.trains else 2  # read and written, and the gradient in the backward
        moved = self.batch * self.dtype.itemsize * rows * (width + results * columns)
        return (moved / CPU_NAN_ROWS + self.batch * keys * width * CPU_KEY) / torch.get_num_threads()

    def timed(self) -> tuple[float, float] | None:
        """The same, timed on the device; None where that is not possible."""
        if not can_measure(self.device, 6 * self.score_bytes + self.mask_bytes):
            return None
        sizes = f"{self.query} {self.key} {self.value} {self.dtype} training={self.trains}"
        sizes += precision_of_products(self.dtype, self.device)
        mask = f"{self.mask} {self.mask_strides} {self.mask_dtype} gradient={self.mask_trains} dropout={self.dropout}"
        if self.is_causal:
            mask += " causal"
        times = measured_in_turns(
            self.device,
            (f"attention apart {sizes}", self._apart),
            (f"attention fused {sizes} mask {mask}", self._fused),
        )
        if times is None:
            return None
        return times[0] + self.mask_bytes / device_model(self.device).bandwidth, times[1] + self.nan_rows

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
        mask = self._mask()
        wanted = [q, k, v] if mask is None or not self.mask_trains else [q, k, v, mask.requires_grad_()]

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.is_causal)

        def step() -> None:
            with torch.enable_grad():
                result = forward()
                torch.autograd.grad(result, wanted, result.detach())

        return step if self.trains else forward

    def _mask(self) -> torch.Tensor | None:
        """A mask of these sizes and strides that masks nothing."""
        if self.mask is None:
            return None
        elements = 1 + sum((size - 1) * stride for size, stride in zip(self.mask, self.mask_strides))
        nothing = torch.ones if self.mask_dtype == torch.bool else torch.zeros
        return nothing(elements, dtype=self.mask_dtype, device=self.device).as_strided(self.mask, self.mask_strides)


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(size_hint, sizes))
