"""The kernel of triptych::parallel_linear and triptych::group_linear. This module imports Triton, so it is imported
only where it is needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .parallel_linear import as_rows
from .registry import dot_precision
from .tuning import bucket, configs, kernel_of, run_tuned


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


OPERANDS = "x{i}, weight{i}, bias{i}, y{i}, rows{i}, out{i}, inner{i}, x_row{i}, x_inner{i}, w_out{i}, w_inner{i}"
"""The arguments of layer i, one by one, because generated code cannot pass tuples."""

SOURCE = '''
def linears_kernel(
OPERANDS
    rows_bucket, out_bucket, inner_bucket,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Tiles of all results in one row; each program finds whose tile it has."""
    tile = tl.program_id(0)
    first = 0
LAYERS
'''

LAYER = """\
    tiles = tl.cdiv(rows{i}, BLOCK_M) * tl.cdiv(out{i}, BLOCK_N)
    if (tile >= first) & (tile < first + tiles):
        linear_tile({operands}, tile - first, (BIASED >> {i}) & 1, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    first += tiles
"""

FEW_ROWS = [
    ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}, 4, 4),
    ({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 256}, 4, 4),
    ({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 512}, 4, 3),
    ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256}, 8, 4),
    ({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}, 4, 4),
    ({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
    ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
    ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32}, 8, 3),
]
MANY_ROWS = [
    ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
    ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32}, 8, 3),
    ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, 8, 4),
    ({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}, 8, 3),
    ({"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 64}, 8, 3),
]
"""For 16-bit dtypes: in float32 the larger tiles do not fit."""
MANY = 256


@functools.cache
def kernel_for(count: int, many_rows: bool) -> Any:
    """The kernel for `count` layers."""
    operands = [OPERANDS.format(i=i) for i in range(count)]
    layers = [LAYER.format(i=i, operands=operands[i]) for i in range(count)]
    source = SOURCE.replace("OPERANDS", "\n".join(f"    {line}," for line in operands))
    kernel = kernel_of(source.replace("LAYERS", "".join(layers)), "linears_kernel", linear_tile=linear_tile)
    keys = ["rows_bucket", "out_bucket", "inner_bucket"]
    return triton.autotune(configs=configs(MANY_ROWS if many_rows else FEW_ROWS), key=keys)(kernel)


def launch(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Launches one layer for each entry of `xs`; the same input may occur several times."""
    flat = {id(x): as_rows(x) for x in xs}
    inputs = [flat[id(x)] for x in xs]
    ys = [x.new_empty(*x.shape[:-1], weight.shape[0]) for x, weight in zip(xs, weights)]
    if all(y.numel() == 0 for y in ys):
        return ys
    sizes = [(*x.shape, weight.shape[0]) for x, weight in zip(inputs, weights)]

    def grid(meta):
        return (sum(triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(out, meta["BLOCK_N"]) for rows, _, out in sizes),)

    operands: list[Any] = []
    for x, weight, bias, y, (rows, inner, out) in zip(inputs, weights, biases, ys, sizes):
        vector = weight if bias is None else bias.contiguous()
        operands += (x, weight, vector, y, rows, out, inner, *x.stride(), *weight.stride())
    all_rows, inners, outs = zip(*sizes)
    buckets = (bucket(max(all_rows)), bucket(sum(outs)), bucket(max(inners)))
    many_rows = max(all_rows) >= MANY and xs[0].dtype.itemsize == 2
    run_tuned(
        kernel_for(len(ys), many_rows), (*buckets, xs[0].dtype, xs[0].device), grid, *operands, *buckets,
        BIASED=sum(1 << i for i, bias in enumerate(biases) if bias is not None), PRECISION=dot_precision(xs[0].dtype),
    )  # fmt: skip
    return ys
