"""The kernel of triptych::sum_parts. Imports Triton: only to be imported where it is wanted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .tuning import configs, kernel_of, run_tuned

ROUNDED_TO = {None: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 0}
"""The kernel's code for the dtype that sums are rounded to before they are stored; 0: they are not."""


@triton.jit
def sum_tile(
    parts, y, begin, columns, rows_count, row_stride, tile,
    THROUGH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some of the sums of one result; `begin` is its first column."""
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
    parts, begin, rows_count, row_stride, RESULTS,
    THROUGH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """Tiles of all results in one row; each program finds whose tile it has."""
    tile = tl.program_id(0)
    first, start = 0, begin
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


@functools.cache
def kernel_for(count: int) -> Any:
    """The kernel of so many results."""
    results = ", ".join(f"y{i}, columns{i}" for i in range(count))  # one by one: generated code passes no tuples
    steps = "".join(STEP.format(before=i - 1, i=i) for i in range(1, count))
    source = SOURCE.replace("RESULTS", results).replace("STEPS", steps)
    kernel = kernel_of(source, "sums_kernel", sum_tile=sum_tile)
    return triton.autotune(configs=configs([({"BLOCK": 64, "ROWS": 32}, 4, 2)]), key=[])(kernel)


def launch(
    parts: torch.Tensor, begin: int, columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None
) -> list[torch.Tensor]:
    """The sums of the columns from `begin` on."""
    parts = parts.contiguous()
    ys = [parts.new_empty(count, dtype=dtype) for count in columns]
    if not any(columns):
        return ys

    def grid(meta):
        return (sum(triton.cdiv(count, meta["BLOCK"]) for count in columns),)

    results = [operand for pair in zip(ys, columns) for operand in pair]
    run_tuned(
        kernel_for(len(ys)), (parts.dtype, dtype, parts.device), grid, parts, begin, parts.shape[0], parts.stride(0),
        *results, THROUGH=ROUNDED_TO[through],
    )  # fmt: skip
    return ys
