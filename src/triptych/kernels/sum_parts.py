"""triptych::sum_parts: matrices are added up along their rows, and the sums are returned in several tensors.

`columns` has the size of each result: first those of the first matrix, then those of the second, and so on. Sums are
computed in float32, or in float64 for matrices of that dtype, then rounded to `through` if that is given, and then to
`dtype`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .registry import check, no_products, on_gpu, register

Tensor = torch.Tensor

MOST = 32
"""The most results of one launch; more results take several launches."""


def results_of_each(parts: Sequence[Tensor], columns: Sequence[int]) -> list[list[int]]:
    """The sizes of each matrix's results. Raises an error unless they add up to its number of columns."""
    check(len(parts) > 0 and all(matrix.dim() == 2 for matrix in parts), lambda: "sum_parts takes matrices")
    alike = len({(matrix.dtype, matrix.device) for matrix in parts}) == 1
    check(alike, lambda: "sum_parts takes matrices of one dtype, on one device")
    check(all(size >= 0 for size in columns), lambda: f"{list(columns)} are not numbers of columns")
    widths, remaining, each = [matrix.shape[1] for matrix in parts], iter(columns), []
    for width in widths:
        sizes: list[int] = []
        while sum(sizes) < width and (size := next(remaining, None)) is not None:
            sizes.append(size)
        check(sum(sizes) == width, lambda: f"{list(columns)} are not the columns of matrices of {widths}")
        each.append(sizes)
    empty = list(remaining)
    check(not any(empty), lambda: f"{list(columns)} are not the columns of matrices of {widths}")
    each[-1] += empty
    return each


def anywhere(
    parts: Sequence[Tensor], columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None
) -> list[Tensor]:
    results = []
    for matrix, sizes in zip(parts, results_of_each(parts, columns)):
        sums = matrix.sum(0, dtype=torch.promote_types(matrix.dtype, torch.float32))
        sums = sums if through is None else sums.to(through)
        results += [part.to(dtype, copy=True) for part in sums.split(sizes)]
    return results


def cuda(
    parts: Sequence[Tensor], columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None
) -> list[Tensor]:
    if not on_gpu(*parts):
        return anywhere(parts, columns, dtype, through)
    from .triton_sums import ROUNDED_TO, Sums, launch

    if through not in ROUNDED_TO:
        return anywhere(parts, columns, dtype, through)
    sums = [
        Sums(matrix, begin, size)
        for matrix, sizes in zip(parts, results_of_each(parts, columns))
        for begin, size in zip(itertools.accumulate(sizes, initial=0), sizes)
    ]
    results: list[Tensor] = []
    for first in range(0, len(sums), MOST):
        results += launch(sums[first : first + MOST], dtype, through)
    return results


def fake(
    parts: Sequence[Tensor], columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None
) -> list[Tensor]:
    results_of_each(parts, columns)
    return [parts[0].new_empty(count, dtype=dtype) for count in columns]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    parts, columns, *_ = inputs
    ctx.each = results_of_each(parts, columns)
    ctx.like = parts[0].new_empty(0)
    ctx.rows = [matrix.shape[0] for matrix in parts]


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    remaining, gradients = iter(grads), []
    for rows, sizes in zip(ctx.rows, ctx.each):
        pairs = zip(itertools.islice(remaining, len(sizes)), sizes)
        each = [ctx.like.new_zeros(size) if grad is None else grad.to(ctx.like.dtype) for grad, size in pairs]
        gradients.append(torch.cat([ctx.like, *each]).expand(rows, -1))
    return gradients, None, None, None


register(
    "sum_parts(Tensor[] parts, int[] columns, ScalarType dtype, ScalarType? through) -> Tensor[]",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=no_products,
)  # fmt: skip
