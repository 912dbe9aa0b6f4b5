"""The kernel of triptych::norm_backward. This module imports Triton, so it is imported only where it is needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .norm_backward import parts_of
from .tuning import bucket, configs, run_tuned


@triton.jit
def norm_backward_kernel(
    grad, other_grad, x, mean, rstd, weight, added, dx, parts, rows, columns, rows_a_part,
    HAS_OTHER: tl.constexpr, HAS_ADDED: tl.constexpr, WITH_RESULT_SUMS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All rows of one part, ROWS at a time. A whole row is in registers, and so are the sums of the part."""
    part = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    in_row = places < columns
    weights = tl.load(weight + places, mask=in_row, other=0.0).to(tl.float32)[None, :]
    product_sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    grad_sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    result_sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows_a_part, ROWS):
        in_part = start + tl.arange(0, ROWS)
        row = part * rows_a_part + in_part
        there = (row < rows) & (in_part < rows_a_part)
        inside = there[:, None] & in_row[None, :]
        element = row[:, None] * columns + places[None, :]
        g = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
        if HAS_OTHER:
            g += tl.load(other_grad + element, mask=inside, other=0.0).to(tl.float32)
            g = g.to(grad.dtype.element_ty).to(tl.float32)
        scale = tl.load(rstd + row, mask=there, other=0.0).to(tl.float32)[:, None]
        shift = tl.load(mean + row, mask=there, other=0.0).to(tl.float32)[:, None]
        xhat = (tl.load(x + element, mask=inside, other=0.0).to(tl.float32) - shift) * scale
        xhat = tl.where(inside, xhat, 0.0)
        weighted = g * weights
        first = tl.sum(weighted, 1)[:, None] / columns
        second = tl.sum(weighted * xhat, 1)[:, None] / columns
        result = (scale * (weighted - first - xhat * second)).to(dx.dtype.element_ty)
        if HAS_ADDED:
            other = tl.load(added + element, mask=inside, other=0.0).to(tl.float32)
            result = (result.to(tl.float32) + other).to(dx.dtype.element_ty)
        tl.store(dx + element, result, mask=inside)
        product_sums += g * xhat
        grad_sums += g
        if WITH_RESULT_SUMS:
            result_sums += tl.where(inside, result.to(tl.float32), 0.0)
    blocks = 3 if WITH_RESULT_SUMS else 2
    sums = parts + part * columns * blocks + places
    tl.store(sums, tl.sum(product_sums, 0), mask=in_row)
    tl.store(sums + columns, tl.sum(grad_sums, 0), mask=in_row)
    if WITH_RESULT_SUMS:
        tl.store(sums + 2 * columns, tl.sum(result_sums, 0), mask=in_row)


IN_REGISTERS = 4096
"""Elements of a matrix that one program holds at a time."""


@functools.cache
def kernel_for(block: int) -> Any:
    """The kernel with the configurations for rows of up to `block` columns."""
    most = max(1, IN_REGISTERS // block)
    choices = dict.fromkeys((most, max(1, most // 2)))
    tried = [({"ROWS": rows}, 4 if rows * block <= IN_REGISTERS // 2 else 8, 2) for rows in choices]
    key = ["BLOCK", "HAS_OTHER", "HAS_ADDED", "WITH_RESULT_SUMS"]
    return triton.autotune(configs=configs(tried), key=key)(norm_backward_kernel)


def launch(
    grad: torch.Tensor, other_grad: torch.Tensor | None, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    weight: torch.Tensor, added: torch.Tensor | None, rows_a_part: int, with_result_sums: bool, dx: torch.Tensor,
    parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if dx.numel() == 0:
        parts.zero_()
        return dx, parts
    columns = x.shape[-1]
    rows, block = x.numel() // columns, bucket(columns)
    grad, x, mean, rstd, weight = (t.contiguous() for t in (grad, x, mean, rstd, weight))
    other = grad if other_grad is None else other_grad.contiguous()
    residual = x if added is None else added.contiguous()
    count = parts_of(x, rows_a_part)

    def grid(meta):
        return (count,)

    has_other, has_added = other_grad is not None, added is not None
    key = (block, rows_a_part, has_other, has_added, with_result_sums, grad.dtype, x.dtype, weight.dtype, x.device)
    run_tuned(
        kernel_for(block), key, grid,
        grad, other, x, mean, rstd, weight, residual, dx, parts, rows, columns, rows_a_part,
        HAS_OTHER=has_other, HAS_ADDED=has_added, WITH_RESULT_SUMS=with_result_sums, BLOCK=block,
    )  # fmt: skip
    return dx, parts
