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
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from ..cost import UNKNOWN, DeviceModel, Moved, Operand, Part, Product, Work
from ..cost.device import HALF
from ..cost.parts import MODEL_ERROR
from ..cost.timing import Run
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


def require_quicker(m: Match, plan: AttentionPlan) -> None:
    """Leave an attention as it is where its kernel is slower."""
    device = plan.query.device
    if device is None or device.type not in ("cpu", "cuda"):
        return
    old, new = forms(device, kernel_of(plan))
    if device.type == "cpu":
        m.require(plan.may_have_kernel or old.seconds() < new.too_short, NO_KERNEL)
    m.pays(old, new)


def kernel_of(plan: AttentionPlan) -> AttentionKernel:
    q, k, v = (replace(Operand.of(value.tensor), dtype=plan.dtype) for value in (plan.query, plan.key, plan.value))
    mask, trains = plan.attn_mask, plan.draft.program.is_training
    if mask is None:
        return AttentionKernel(q, k, v, trains, None, plan.is_causal, plan.dropout)
    mask_trains = trains and plan.draft.wants_gradient(mask)
    return AttentionKernel(q, k, v, trains, Operand.of(mask.tensor), plan.is_causal, plan.dropout, mask_trains)


def forms(device: torch.device, kernel: AttentionKernel) -> tuple[Work, Work]:
    """The products and the softmax as they were written, and the kernel with what is added to it."""
    mask, on_cpu = kernel.mask, device.type == "cpu"
    written = AttentionAsWritten(kernel.query, kernel.key, kernel.value, kernel.trains)
    old = Work.of(device, written)
    if mask is not None:
        times = 1 + CPU_BACKWARD_TRAFFIC if on_cpu and kernel.trains else 1
        old += Moved(times * mask.bytes, launches=0)
    if (mask is None or on_cpu) and written.score_bytes >= MUCH_MEMORY:
        old = replace(old, held=written.score_bytes)
    knows = kernel.dtype not in HALF if on_cpu else mask is not None or kernel.is_flash
    kernel = replace(kernel, error=MODEL_ERROR if knows else UNKNOWN)
    if not on_cpu:
        return old, Work.of(device, kernel, too_short=TOO_SHORT if mask is None else 0.0)
    nan_rows = NanRows(kernel.query, kernel.key, kernel.value, kernel.trains)
    return old, Work.of(device, kernel, nan_rows, too_short=CPU_TOO_SHORT)


@dataclass(frozen=True)
class Attention(Part):
    """What all parts depend on."""

    query: Operand
    key: Operand
    value: Operand
    trains: bool

    products = True

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The batch, the queries, the keys, the columns of both, and those of the values."""
        *batch, rows, width = self.query.shape
        return math.prod(batch), rows, self.key.shape[-2], width, self.value.shape[-1]

    @property
    def score_bytes(self) -> int:
        batch, rows, keys, _, _ = self.sizes
        return batch * rows * keys * self.dtype.itemsize

    @property
    def bytes(self) -> float:
        """Of the operands and of the result."""
        batch, rows, _, _, columns = self.sizes
        result = batch * rows * columns * self.dtype.itemsize
        return (1 + self.trains) * (self.query.bytes + self.key.bytes + self.value.bytes + result)

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.multiplied(self.dtype))

    def multiplied(self, dtype: torch.dtype) -> list[Product]:
        """The products: two, and in training the four of the backward."""
        batch, rows, keys, width, columns = self.sizes
        sizes = [(rows, keys, width), (rows, columns, keys)]
        if self.trains:
            sizes += [(rows, keys, columns), (keys, columns, rows), (rows, width, keys), (keys, width, rows)]
        return [Product.sized(*one, dtype, batch) for one in sizes]

    def random(self, device: torch.device) -> list[torch.Tensor]:
        return [operand.random(device) for operand in (self.query, self.key, self.value)]


@dataclass(frozen=True)
class AttentionAsWritten(Attention):
    """The attention without fusion, as it is compiled: the products, and one kernel for everything between them; in
    training also for the backward."""

    @property
    def launches(self) -> int:
        return 8 if self.trains else 3

    @property
    def bytes(self) -> float:
        return super().bytes + (9 if self.trains else 4) * self.score_bytes

    @property
    def memory(self) -> float:
        return 6 * self.score_bytes + 2 * super().bytes

    def seconds(self, model: DeviceModel) -> float:
        if model.is_gpu:
            between = (5 if self.trains else 2) * self.score_bytes / model.bandwidth
            return sum(product.seconds(model) for product in self.multiplied(self.dtype)) + between
        moved = max(0, self.score_bytes - CPU_CACHE) / (CPU_TRAFFIC * torch.get_num_threads())
        traffic = (1 + CPU_BACKWARD_TRAFFIC) * moved if self.trains else moved
        return _by_products(self, model) + traffic

    def prepare(self, device: torch.device) -> Run:
        q, k, v = self.random(device)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            p = torch.softmax(q @ k.mT, -1)
            return p, p @ v

        def step() -> None:
            p, result = forward()
            grad = torch.ops.aten._softmax_backward_data(result @ v.mT, p, -1, p.dtype)
            p.mT @ result, grad @ k, grad.mT @ q

        return step if self.trains else forward


@dataclass(frozen=True)
class AttentionKernel(Attention):
    """The kernel, in training with that of the backward."""

    mask: Operand | None = None
    is_causal: bool = False
    dropout: float = 0.0
    mask_trains: bool = False
    error: float = field(default=MODEL_ERROR, repr=False)

    @property
    def launches(self) -> int:
        return 2 if self.trains else 1

    @property
    def bytes(self) -> float:
        return super().bytes + (0 if self.mask is None else self.mask.bytes)

    @property
    def is_flash(self) -> bool:
        """Is it, on a GPU, the kernel for half precision without a mask?"""
        _, _, _, width, columns = self.sizes
        return self.mask is None and self.dtype in HALF and max(width, columns) <= FLASH_WIDTH

    @property
    def _rates(self) -> tuple[float, float, float]:
        """The fractions of the GEMM rate that the kernel on a GPU reaches, and the seconds of its smallest block."""
        if self.is_flash:
            return FLASH_FORWARD_RATE, FLASH_BACKWARD_RATE, FLASH_BLOCK_SECONDS
        if self.mask is None and self.dtype not in HALF:
            return SINGLE_RATE, SINGLE_RATE, BLOCK_SECONDS
        return FORWARD_RATE, BACKWARD_RATE, BLOCK_SECONDS

    def seconds(self, model: DeviceModel) -> float:
        batch, rows, keys, width, columns = self.sizes
        if not model.is_gpu:
            # the backward computes the scores again, head by head
            again = Product.sized(rows, keys, width, torch.float32, batch).modelled(model) if self.trains else 0.0
            heads = (1 + self.trains) * CPU_HEAD * batch / torch.get_num_threads()
            return _by_products(self, model) + again + heads
        work = 2.0 * batch * rows * keys * (width + columns) / model.flops(self.dtype)
        if self.is_causal and self.mask is None:
            work /= 2  # the kernel leaves out blocks that are masked
        forward, backward, block = self._rates
        least = block * max(1.0, batch * math.ceil(rows / BLOCK_ROWS) / model.cores)
        seconds = max(work / forward, least)
        return seconds + BACKWARD_WORK * max(work / backward, least) if self.trains else seconds

    def prepare(self, device: torch.device) -> Run:
        q, k, v = (t.requires_grad_(self.trains) for t in self.random(device))
        mask = None if self.mask is None else self.mask.random(device)
        wanted = [q, k, v] if mask is None or not self.mask_trains else [q, k, v, mask.requires_grad_()]

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.is_causal)

        def step() -> None:
            with torch.enable_grad():
                result = forward()
                torch.autograd.grad(result, wanted, result.detach())

        return step if self.trains else forward


def _by_products(part: Attention, model: DeviceModel) -> float:
    """Seconds of the products on a CPU, which computes them in float32. Besides them, no launch counts."""
    return sum(one.modelled(model) for one in part.multiplied(torch.float32)) - part.launches * model.launch


@dataclass(frozen=True)
class NanRows(Attention):
    """The operations that set rows to NaN behind a kernel on a CPU, which are fused with others."""

    launches = 0

    def seconds(self, model: DeviceModel) -> float:
        batch, rows, keys, width, columns = self.sizes
        results = 4 if self.trains else 2  # read and written, and the gradient in the backward
        moved = batch * self.dtype.itemsize * rows * (width + results * columns)
        return (moved / CPU_NAN_ROWS + batch * keys * width * CPU_KEY) / torch.get_num_threads()
