"""The kernel of triptych::sum_rows. Imports Triton: only to be imported where it is wanted."""

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

MANY_ROWS = 512
FEW = [({"BLOCK": 64, "ROWS": 32}, 4, 2)]
MANY = [({"BLOCK": 32, "ROWS": 256}, 8, 3), ({"BLOCK": 64, "ROWS": 128}, 8, 3), ({"BLOCK": 32, "ROWS": 128}, 4, 3)]
"""Configurations for matrices with fewer rows, and with that many or more: those read more rows at a time."""


@triton.jit
def sum_tile(x, y, columns, rows_count, tile, THROUGH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The sums of one tile of columns of one matrix."""
    places = tile * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows_count, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < rows_count)[:, None] & (places < columns)[None, :]
        numbers = tl.load(x + rows[:, None] * columns + places[None, :], mask=inside, other=0.0)
        total += numbers.to(tl.float32)
    sums = tl.sum(total, 0)
    if THROUGH == 1:
        sums = sums.to(tl.bfloat16).to(tl.float32)
    if THROUGH == 2:
        sums = sums.to(tl.float16).to(tl.float32)
    tl.store(y + places, sums.to(y.dtype.element_ty), mask=places < columns)


SOURCE = '''
def sums_kernel(rows_count, MATRICES, THROUGH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tiles of all matrices are numbered in a row; each program finds the matrix that its tile is in."""
    tile = tl.program_id(0)
    first = 0
    x, y, columns, its_first = x0, y0, columns0, first
STEPS
    sum_tile(x, y, columns, rows_count, tile - its_first, THROUGH, BLOCK, ROWS)
'''

STEP = """\
    first += tl.cdiv(columns{before}, BLOCK)
    if tile >= first:
        x, y, columns, its_first = x{i}, y{i}, columns{i}, first
"""


@functools.cache
def kernel_for(count: int, many_rows: bool) -> Any:
    """The kernel for this number of matrices."""
    matrices = ", ".join(f"x{i}, y{i}, columns{i}" for i in range(count))  # one by one: generated code passes no tuples
    steps = "".join(STEP.format(before=i - 1, i=i) for i in range(1, count))
    source = SOURCE.replace("MATRICES", matrices).replace("STEPS", steps)
    kernel = kernel_of(source, "sums_kernel", sum_tile=sum_tile)
    return triton.autotune(configs=configs(MANY if many_rows else FEW), key=[])(kernel)


def launch(xs: Sequence[torch.Tensor], dtype: torch.dtype, through: torch.dtype | None) -> list[torch.Tensor]:
    ys = [x.new_empty(x.shape[1], dtype=dtype) for x in xs]
    columns, rows = [x.shape[1] for x in xs], xs[0].shape[0]
    if not any(columns):
        return ys

    def grid(meta):
        return (sum(triton.cdiv(count, meta["BLOCK"]) for count in columns),)

    matrices = [operand for x, y, n in zip(xs, ys, columns) for operand in (x.contiguous(), y, n)]
    run_tuned(
        kernel_for(len(ys), rows >= MANY_ROWS), (xs[0].dtype, dtype, xs[0].device), grid, rows, *matrices,
        THROUGH=ROUNDED_TO[through],
    )  # fmt: skip
    return ys
