"""The kernel of triptych::group_linear. Imports Triton: only to be imported where it is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .parallel_linear import as_rows
from .registry import dot_precision
from .triton_parallel_linear import linear_tile
from .tuning import bucket, configs, run_tuned


@triton.autotune(
    configs=configs([
        ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}, 4, 4),
        ({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}, 4, 4),
        ({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
        ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
        ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32}, 8, 3),
    ]),
    key=["rows_bucket", "out_bucket", "inner_bucket", "COUNT"],
)  # fmt: skip
@triton.jit
def group_linear_kernel(
    xs, weights, biases, ys, rows, inners, outs, x_rows, x_inners, w_outs, w_inners,
    rows_bucket, out_bucket, inner_bucket,
    COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles of all results in one row; each program finds whose tile it has."""
    tile = tl.program_id(0)
    first = 0
    for i in tl.static_range(COUNT):
        tiles = tl.cdiv(rows[i], BLOCK_M) * tl.cdiv(outs[i], BLOCK_N)
        if (tile >= first) & (tile < first + tiles):
            linear_tile(
                xs[i], weights[i], biases[i], ys[i], rows[i], outs[i], inners[i],
                x_rows[i], x_inners[i], w_outs[i], w_inners[i], tile - first,
                HAS_BIAS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        first += tiles


def launch(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    flat = [as_rows(x) for x in xs]
    rows, inners = ([x.shape[d] for x in flat] for d in (0, 1))
    outs = [w.shape[0] for w in weights]
    ys = [x.new_empty(*x.shape[:-1], out) for x, out in zip(xs, outs)]
    if all(y.numel() == 0 for y in ys):
        return ys

    def grid(meta):
        sizes = zip(rows, outs)
        return (sum(triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]) for m, n in sizes),)

    vectors = [b.contiguous() for b in biases] or weights
    buckets = (bucket(max(rows)), bucket(sum(outs)), bucket(max(inners)))
    run_tuned(
        group_linear_kernel, (*buckets, len(ys), xs[0].dtype, xs[0].device), grid,
        tuple(flat), tuple(weights), tuple(vectors), tuple(ys), tuple(rows), tuple(inners), tuple(outs),
        tuple(x.stride(0) for x in flat), tuple(x.stride(1) for x in flat),
        tuple(w.stride(0) for w in weights), tuple(w.stride(1) for w in weights),
        *buckets,
        COUNT=len(ys), HAS_BIAS=bool(biases), PRECISION=dot_precision(xs[0].dtype),
    )  # fmt: skip
    return ys
