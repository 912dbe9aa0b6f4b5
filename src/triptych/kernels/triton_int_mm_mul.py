"""The kernel of triptych::int_mm_mul, one for each list of scales and roundings. This module imports Triton, so it is
imported only where it is needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .tuning import bucket, configs, kernel_of, run_tuned


@triton.jit
def rounded_to_bfloat16(x):
    """A float32 rounded to bfloat16, as float32. It is extended by its bits: a product of two numbers that were seen to
    be extended would be computed in bfloat16, which rounds once where torch rounds twice, if the result is below the
    normal numbers."""
    return (x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


SOURCE = '''
def int_mm_mul_kernel(
    a, b, y, m, n, k, a_m, a_k, b_k, b_n,
SCALES
    m_bucket, n_bucket, k_bucket,
    EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One tile of the result. GROUP rows of tiles are computed column by column, so that what they share stays in the
    cache. Where k is EVEN, only whole blocks are read along it."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    place = tile % (GROUP * tiles_n)
    rows = ((first + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = ((place // height) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    in_m, in_n = rows < m, columns < n
    a_tile = a + rows[:, None] * a_m + inner[None, :] * a_k
    b_tile = b + inner[:, None] * b_k + columns[None, :] * b_n
    step = tl.full((1, 1), BLOCK_K, tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, k, BLOCK_K):
        if EVEN:
            left = tl.load(a_tile, mask=in_m[:, None], other=0)
            right = tl.load(b_tile, mask=in_n[None, :], other=0)
        else:
            in_k = inner < k - start
            left = tl.load(a_tile, mask=in_m[:, None] & in_k[None, :], other=0)
            right = tl.load(b_tile, mask=in_k[:, None] & in_n[None, :], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        a_tile += step * a_k
        b_tile += step * b_k
    # torch rounds twice, to float32 and then to a shorter dtype; without the sum, Triton would convert directly
    v = total.to(tl.float32) + 0.0
STEPS
    y_tile = y + rows[:, None] * n + columns[None, :]
    tl.store(y_tile, v.to(y.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
'''

ROUNDED = {
    torch.float32: "v",
    torch.bfloat16: "rounded_to_bfloat16(v)",
    torch.float16: "v.to(tl.float16).to(tl.float32)",
}
"""A value of the kernel, which computes in float32, rounded to a dtype."""

LOADED = {
    "number": "tl.load(scale{i})",
    "column": "tl.load(scale{i} + columns * scale{i}_n, mask=in_n, other=0.0)[None, :]",
    "row": "tl.load(scale{i} + rows * scale{i}_m, mask=in_m, other=0.0)[:, None]",
    "matrix": "tl.load(scale{i} + rows[:, None] * scale{i}_m + columns[None, :] * scale{i}_n, "
    "mask=in_m[:, None] & in_n[None, :], other=0.0)",
}
"""How the kernel reads a scale: one for all elements, for each column, for each row, for each element."""

GROUP = 8
CONFIGS = [
    ({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}, 4, 4),
    ({"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128}, 4, 4),
    ({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 256}, 4, 4),
    ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128}, 4, 4),
    ({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128}, 4, 4),
    ({"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 128}, 4, 3),
    ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, 4, 4),
    ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}, 8, 4),
    ({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128}, 8, 3),
    ({"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 128}, 8, 3),
]
LARGEST_K = max(blocks["BLOCK_K"] for blocks, _, _ in CONFIGS)


@functools.cache
def kernel_for(kinds: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> Any:
    """The kernel for scales of these kinds, with the roundings written into it; the last one is that of the store."""
    steps = [f"v = {ROUNDED[dtypes[0]]}"]
    for i, (kind, dtype) in enumerate(zip(kinds, dtypes[1:])):
        steps.append(f"v = v * {LOADED[kind].format(i=i)}.to(tl.float32)")
        steps.append(f"v = {ROUNDED[dtype]}")
    body = "\n".join("    " + step for step in steps[:-1] if step != "v = v")
    operands = "\n".join(f"    scale{i}, scale{i}_m, scale{i}_n," for i in range(len(kinds)))  # tuples cannot be passed
    source = SOURCE.replace("SCALES", operands).replace("STEPS", body)
    kernel = kernel_of(source, "int_mm_mul_kernel", rounded_to_bfloat16=rounded_to_bfloat16)
    key = ["m_bucket", "n_bucket", "k_bucket", "a_k", "b_k"]
    return triton.autotune(configs=configs(CONFIGS), key=key)(kernel)


def _as_matrix(scale: torch.Tensor) -> tuple[str, int, int]:
    """The kind of a scale, and its strides along the rows and the columns of the result."""
    sizes, strides = ((1, 1, *scale.shape)[-2:], (0, 0, *scale.stride())[-2:])
    along_m, along_n = (0 if size == 1 else stride for size, stride in zip(sizes, strides))
    kinds = {(False, False): "number", (False, True): "column", (True, False): "row", (True, True): "matrix"}
    return kinds[along_m != 0, along_n != 0], along_m, along_n


def launch(
    a: torch.Tensor, b: torch.Tensor, scales: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    y = a.new_empty((m, n), dtype=dtypes[-1])
    if y.numel() == 0:
        return y

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    read = [_as_matrix(scale) for scale in scales]
    kinds, operands = tuple(kind for kind, *_ in read), []
    for scale, (_, along_m, along_n) in zip(scales, read):
        operands += [scale, along_m, along_n]
    buckets = bucket(m), bucket(n), bucket(k)
    run_tuned(
        kernel_for(kinds, tuple(dtypes)), (*buckets, a.stride(1), b.stride(0), a.device), grid,
        a, b, y, m, n, k, *a.stride(), *b.stride(), *operands, *buckets,
        EVEN=k % LARGEST_K == 0, GROUP=GROUP,
    )  # fmt: skip
    return y
