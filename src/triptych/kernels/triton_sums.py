"""The kernel of triptych::sum_parts. This module imports Triton, so it is imported only where it is needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .tuning import configs, kernel_of, run_tuned

ROUNDED_TO = {None: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 0, torch.float64: 0}
"""The kernel's number for the dtype `through`; 0 where the float32 sums need no rounding to it."""


class Sums(NamedTuple):
    """One result: the sums of some columns of a matrix."""

    matrix: torch.Tensor
    begin: int
    size: int


@triton.jit
def sum_tile(
    parts, y, begin, columns, rows_count, row_stride, tile,
    THROUGH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of a result. `begin` is the column of the matrix where the result begins."""
    places = tile * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows_count, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < rows_count)[:, None] & (places < columns)[None, :]
        numbers = tl.load(parts + rows[:, None] * row_stride + (begin + places)[None, :], mask=inside, other=0.0)
        total += numbers.to(tl.float32)
    sums = tl.sum(total, 0)
    if THROUGH == 1:
        sums = sums.to(tl.bfloat16).to(tl.float32)
    if THROUGH == 2:
        sums = sums.to(tl.float16).to(tl.float32)
    tl.store(y + places, sums.to(y.dtype.element_ty), mask=places < columns)


SOURCE = '''
def sums_kernel(
    OPERANDS,
    THROUGH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """The tiles of all results are numbered one after the other; each program finds the result that its tile is of."""
    tile = tl.program_id(0)
    first, start = 0, begin0
    parts, rows_count, row_stride = parts0, rows0, stride0
    y, columns, its_first, its_start = y0, columns0, first, start
STEPS
    sum_tile(parts, y, its_start, columns, rows_count, row_stride, tile - its_first, THROUGH, BLOCK, ROWS)
'''

STEP = """\
    first += tl.cdiv(columns{before}, BLOCK)
    start += columns{before}
    if tile >= first:
        y, columns, its_first, its_start = y{i}, columns{i}, first, start
"""

STEP_TO_NEXT_MATRIX = """\
    first += tl.cdiv(columns{before}, BLOCK)
    start = begin{matrix}
    if tile >= first:
        parts, rows_count, row_stride = parts{matrix}, rows{matrix}, stride{matrix}
        y, columns, its_first, its_start = y{i}, columns{i}, first, start
"""


@functools.cache
def kernel_for(results: tuple[int, ...]) -> Any:
    """The kernel for matrices of which each has this number of results."""
    operands: list[str] = []  # one by one: generated code passes no tuples
    steps: list[str] = []
    for matrix, count in enumerate(results):
        operands += [f"{name}{matrix}" for name in ("parts", "rows", "stride", "begin")]
        for is_first in (True, *[False] * (count - 1)):
            i = len(steps)
            operands += [f"y{i}", f"columns{i}"]
            steps.append((STEP_TO_NEXT_MATRIX if is_first else STEP).format(before=i - 1, i=i, matrix=matrix))
    source = SOURCE.replace("OPERANDS", ", ".join(operands)).replace("STEPS", "".join(steps[1:]))
    kernel = kernel_of(source, "sums_kernel", sum_tile=sum_tile)
    return triton.autotune(configs=configs([({"BLOCK": 64, "ROWS": 32}, 4, 2)]), key=[])(kernel)


def launch(sums: Sequence[Sums], dtype: torch.dtype, through: torch.dtype | None) -> list[torch.Tensor]:
    """One result for each entry; the entries of one matrix follow each other, from its first column to its last."""
    ys = [s.matrix.new_empty(s.size, dtype=dtype) for s in sums]
    sizes = [s.size for s in sums]
    if not any(sizes):
        return ys

    def grid(meta):
        return (sum(triton.cdiv(size, meta["BLOCK"]) for size in sizes),)

    operands: list[Any] = []
    results: list[int] = []  # of each matrix
    for i, (s, y) in enumerate(zip(sums, ys)):
        if i == 0 or s.begin == 0:
            matrix = s.matrix if s.matrix.stride(1) == 1 else s.matrix.contiguous()
            operands += [matrix, matrix.shape[0], matrix.stride(0), s.begin]
            results.append(0)
        operands += [y, s.size]
        results[-1] += 1
    key = (tuple(results), sums[0].matrix.dtype, dtype, sums[0].matrix.device)
    run_tuned(kernel_for(key[0]), key, grid, *operands, THROUGH=ROUNDED_TO[through])
    return ys
