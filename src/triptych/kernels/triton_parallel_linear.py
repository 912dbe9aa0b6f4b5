"""The kernel of triptych::parallel_linear. Imports Triton: only to be imported where it is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .parallel_linear import as_rows
from .registry import dot_precision
from .tuning import bucket, configs, run_tuned


@triton.jit
def linear_tile(
    x, weight, bias, y, rows_count, out, inner_count, x_row, x_inner, w_out, w_inner, tile,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one result; tiles that share weights follow each other, so that these stay in the cache."""
    tiles_m = tl.cdiv(rows_count, BLOCK_M)
    rows = ((tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = ((tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    x_tile = x + rows[:, None] * x_row + inner[None, :] * x_inner
    w_tile = weight + columns[None, :] * w_out + inner[:, None] * w_inner
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inner_count, BLOCK_K):
        inside = inner < inner_count - start
        v = tl.load(x_tile, mask=(rows < rows_count)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_tile, mask=inside[:, None] & (columns < out)[None, :], other=0.0)
        total = tl.dot(v, w, total, input_precision=PRECISION)
        x_tile += BLOCK_K * x_inner
        w_tile += BLOCK_K * w_inner
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < out, other=0.0).to(tl.float32)[None, :]
    y_tile = y + rows[:, None] * out + columns[None, :]
    tl.store(y_tile, total.to(y.dtype.element_ty), mask=(rows < rows_count)[:, None] & (columns < out)[None, :])


@triton.autotune(
    configs=configs([
        ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}, 4, 4),
        ({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 256}, 4, 4),
        ({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 512}, 4, 3),
        ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256}, 8, 4),
        ({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}, 4, 4),
        ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
        ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32}, 8, 3),
    ]),
    key=["rows_bucket", "out_bucket", "inner_bucket", "COUNT"],
)  # fmt: skip
@triton.jit
def parallel_linear_kernel(
    x, weights, biases, ys, outs, w_outs, w_inners, rows_count, inner_count, x_row, x_inner,
    rows_bucket, out_bucket, inner_bucket,
    COUNT: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles of all results in one row; each program finds whose tile it has."""
    tile = tl.program_id(0)
    first = 0
    for i in tl.static_range(COUNT):
        tiles = tl.cdiv(rows_count, BLOCK_M) * tl.cdiv(outs[i], BLOCK_N)
        if (tile >= first) & (tile < first + tiles):
            linear_tile(
                x, weights[i], biases[i], ys[i], rows_count, outs[i], inner_count,
                x_row, x_inner, w_outs[i], w_inners[i], tile - first,
                (BIASED >> i) & 1, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        first += tiles


def launch(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    rows = as_rows(x)
    count, inner = rows.shape
    outs = [w.shape[0] for w in weights]
    ys = [x.new_empty(*x.shape[:-1], out) for out in outs]
    if count == 0 or sum(outs) == 0:
        return ys

    def grid(meta):
        return (triton.cdiv(count, meta["BLOCK_M"]) * sum(triton.cdiv(out, meta["BLOCK_N"]) for out in outs),)

    vectors = [w if b is None else b.contiguous() for w, b in zip(weights, biases)]
    buckets = (bucket(count), bucket(sum(outs)), bucket(inner))
    run_tuned(
        parallel_linear_kernel, (*buckets, len(ys), x.dtype, x.device), grid,
        rows, tuple(weights), tuple(vectors), tuple(ys), tuple(outs),
        tuple(w.stride(0) for w in weights), tuple(w.stride(1) for w in weights),
        count, inner, *rows.stride(), *buckets,
        COUNT=len(ys), BIASED=sum(1 << i for i, b in enumerate(biases) if b is not None),
        PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
    return ys
