"""The kernel of triptych::dot_compress. This module imports Triton, so it is imported only where it is needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .registry import dot_precision
from .tuning import bucket, configs, run_tuned


@triton.autotune(
    configs=configs([
        ({"BLOCK_N": 32, "BLOCK_K": 32}, 4, 3),
        ({"BLOCK_N": 64, "BLOCK_K": 16}, 4, 3),
        ({"BLOCK_N": 64, "BLOCK_K": 32}, 4, 3),
        ({"BLOCK_N": 64, "BLOCK_K": 64}, 4, 2),
        ({"BLOCK_N": 64, "BLOCK_K": 64}, 8, 3),
        ({"BLOCK_N": 128, "BLOCK_K": 32}, 8, 2),
    ]),
    key=["batch_bucket", "n_bucket", "d_bucket", "k_bucket"],
)  # fmt: skip
@triton.jit
def dot_compress_kernel(
    x, w, y, n, d, k,
    x_batch, x_n, x_d, w_batch, w_n, w_k, y_batch, y_n, y_k,
    batch_bucket, n_bucket, d_bucket, k_bucket,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K columns of one batch element: first x^T w, which stays in registers, then x times it."""
    tiles = tl.cdiv(k, BLOCK_K)
    pid = tl.program_id(0)
    batch = (pid // tiles).to(tl.int64)
    columns = ((pid % tiles) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    inner = tl.arange(0, BLOCK_D).to(tl.int64)
    steps = tl.arange(0, BLOCK_N).to(tl.int64)
    x += batch * x_batch
    w += batch * w_batch
    y += batch * y_batch
    in_d, in_k = inner < d, columns < k
    compressed = tl.zeros((BLOCK_D, BLOCK_K), dtype=tl.float32)
    for start in range(0, n, BLOCK_N):
        rows = start + steps
        turned = tl.load(x + rows[None, :] * x_n + inner[:, None] * x_d, mask=(rows < n)[None, :] & in_d[:, None],
                         other=0.0)  # fmt: skip
        part = tl.load(w + rows[:, None] * w_n + columns[None, :] * w_k, mask=(rows < n)[:, None] & in_k[None, :],
                       other=0.0)  # fmt: skip
        compressed = tl.dot(turned, part, compressed, input_precision=PRECISION)
    short = compressed.to(x.dtype.element_ty)
    for start in range(0, n, BLOCK_N):
        rows = start + steps
        v = tl.load(x + rows[:, None] * x_n + inner[None, :] * x_d, mask=(rows < n)[:, None] & in_d[None, :],
                    other=0.0)  # fmt: skip
        made = tl.dot(v, short, input_precision=PRECISION)
        tl.store(y + rows[:, None] * y_n + columns[None, :] * y_k, made.to(y.dtype.element_ty),
                 mask=(rows < n)[:, None] & in_k[None, :])  # fmt: skip


def launch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    batch, n, d = x.shape
    k = w.shape[-1]
    y = x.new_empty(batch, n, k)
    if y.numel() == 0:
        return y
    w_strides = (0, *w.stride()) if w.dim() == 2 else w.stride()

    def grid(meta):
        return (batch * triton.cdiv(k, meta["BLOCK_K"]),)

    buckets = (bucket(batch), bucket(n), bucket(d), bucket(k))
    run_tuned(
        dot_compress_kernel, (*buckets, x.dtype, x.device), grid,
        x, w, y, n, d, k, *x.stride(), *w_strides, *y.stride(),
        *buckets,
        PRECISION=dot_precision(x.dtype), BLOCK_D=max(16, bucket(d)),
    )  # fmt: skip
    return y
