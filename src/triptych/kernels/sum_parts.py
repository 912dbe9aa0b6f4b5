"""triptych::sum_parts: a matrix is added up along its rows, and the sums are returned in several tensors.

`columns` is the size of each of these tensors. Sums are computed in float32, or in float64 for a matrix of that dtype,
then rounded to `through` if that is given, and then to `dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import check, on_gpu, register

Tensor = torch.Tensor

MOST = 32
"""Results of one launch; more take several launches."""


def _check(parts: Tensor, columns: Sequence[int]) -> None:
    check(parts.dim() == 2, lambda: "sum_parts takes a matrix")
    check(sum(columns) == parts.shape[1], lambda: f"{list(columns)} are not the columns of {list(parts.shape)}")


def anywhere(
    parts: Tensor, columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None
) -> list[Tensor]:
    _check(parts, columns)
    sums = parts.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32))
    sums = sums if through is None else sums.to(through)
    return [part.to(dtype, copy=True) for part in sums.split(list(columns))]


def cuda(parts: Tensor, columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None) -> list[Tensor]:
    if not on_gpu(parts):
        return anywhere(parts, columns, dtype, through)
    _check(parts, columns)
    from .triton_sums import launch

    made: list[Tensor] = []
    for first in range(0, len(columns), MOST):
        begin = sum(columns[:first])
        made += launch(parts, begin, columns[first : first + MOST], dtype, through)
    return made


def fake(parts: Tensor, columns: Sequence[int], dtype: torch.dtype, through: torch.dtype | None) -> list[Tensor]:
    _check(parts, columns)
    return [parts.new_empty(count, dtype=dtype) for count in columns]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    parts, ctx.columns, *_ = inputs
    ctx.like = parts.new_empty(0)
    ctx.rows = parts.shape[0]


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    each = [ctx.like.new_zeros(n) if g is None else g.to(ctx.like.dtype) for g, n in zip(grads, ctx.columns)]
    return torch.cat(each).expand(ctx.rows, -1), None, None, None


register(
    "sum_parts(Tensor parts, int[] columns, ScalarType dtype, ScalarType? through) -> Tensor[]",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
)  # fmt: skip
