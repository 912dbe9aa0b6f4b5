"""The kernel of triptych::lce. This module imports Triton, so it is imported only where it is needed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .lce import new_result
from .registry import dot_precision
from .tuning import bucket, configs, run_tuned


@triton.jit
def tanh(x):
    """Accurate to the last bits also near zero, where 1 - exp(-2 x) would cancel."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = size * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    y = tl.where(size < 0.04, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def apply_epilogue(z, EPILOGUE: tl.constexpr):
    if EPILOGUE == "relu":
        z = tl.where(z < 0, 0.0, z)  # NaN stays NaN
    elif EPILOGUE == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    elif EPILOGUE == "tanh":
        z = tanh(z)
    elif EPILOGUE == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif EPILOGUE == "silu":
        z = z / (1.0 + tl.exp(-z))
    return z


@triton.autotune(
    configs=configs([
        ({"BLOCK_M": 64, "BLOCK_D": 64, "BLOCK_N": 32}, 4, 3),
        ({"BLOCK_M": 32, "BLOCK_D": 64, "BLOCK_N": 64}, 4, 3),
        ({"BLOCK_M": 64, "BLOCK_D": 32, "BLOCK_N": 64}, 4, 3),
        ({"BLOCK_M": 128, "BLOCK_D": 64, "BLOCK_N": 32}, 4, 4),
        ({"BLOCK_M": 64, "BLOCK_D": 128, "BLOCK_N": 64}, 8, 3),
        ({"BLOCK_M": 128, "BLOCK_D": 128, "BLOCK_N": 32}, 8, 3),
    ]),
    key=["batch_bucket", "m_bucket", "n_bucket", "d_bucket", "TRANSPOSED"],
)  # fmt: skip
@triton.jit
def lce_kernel(
    x, weight, bias, y, m, n, d,
    x_batch, x_n, x_d, w_m, w_n, bias_m, y_batch, y_m, y_d,
    batch_bucket, m_bucket, n_bucket, d_bucket,
    TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of one batch element: BLOCK_M features of the result at BLOCK_D places."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_d = tl.cdiv(d, BLOCK_D)
    pid = tl.program_id(0)
    batch = (pid // (tiles_m * tiles_d)).to(tl.int64)
    tile = pid % (tiles_m * tiles_d)
    rows = ((tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = ((tile // tiles_m) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    inner = tl.arange(0, BLOCK_N).to(tl.int64)
    w_tile = weight + rows[:, None] * w_m + inner[None, :] * w_n
    x_tile = x + batch * x_batch + inner[:, None] * x_n + columns[None, :] * x_d
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, n, BLOCK_N):
        inside = inner < n - start
        w = tl.load(w_tile, mask=(rows < m)[:, None] & inside[None, :], other=0.0)
        v = tl.load(x_tile, mask=inside[:, None] & (columns < d)[None, :], other=0.0)
        total = tl.dot(w, v, total, input_precision=PRECISION)
        w_tile += BLOCK_N * w_n
        x_tile += BLOCK_N * x_n
    if HAS_BIAS:
        total += tl.load(bias + rows * bias_m, mask=rows < m, other=0.0).to(tl.float32)[:, None]
    total = apply_epilogue(total, EPILOGUE)
    y_tile = y + batch * y_batch + rows[:, None] * y_m + columns[None, :] * y_d
    tl.store(y_tile, total.to(y.dtype.element_ty), mask=(rows < m)[:, None] & (columns < d)[None, :])


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: str, transposed: bool
) -> torch.Tensor:
    batch, n, d = x.shape
    m = weight.shape[0]
    y = new_result(x, weight, transposed)
    if y.numel() == 0:
        return y

    def grid(meta):
        return (batch * triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(d, meta["BLOCK_D"]),)

    buckets = (bucket(batch), bucket(m), bucket(n), bucket(d))
    run_tuned(
        lce_kernel, (*buckets, transposed, x.dtype, x.device), grid,
        x, weight, weight if bias is None else bias, y, m, n, d,
        *x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0), *y.stride(),
        *buckets,
        TRANSPOSED=transposed, EPILOGUE=epilogue, HAS_BIAS=bias is not None, PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
    return y
