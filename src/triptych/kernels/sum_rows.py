"""triptych::sum_rows: the sums over the rows of several matrices, each sum in a tensor of its own.

All matrices have the same number of rows and the same dtype. Sums are computed in float32, or in float64 for matrices
of that dtype, then rounded to `through` if that is given, and then to `dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import check, on_gpu, register

Tensor = torch.Tensor

MOST = 32
"""Matrices per launch; more take several launches."""


def _check(xs: Sequence[Tensor]) -> None:
    check(len(xs) > 0, lambda: "sum_rows takes at least one matrix")
    for x in xs:
        check(x.dim() == 2, lambda: "sum_rows takes matrices")
        check(x.shape[0] == xs[0].shape[0], lambda: "sum_rows takes matrices with the same number of rows")
        check(x.dtype == xs[0].dtype, lambda: "sum_rows takes matrices of one dtype")


def anywhere(xs: Sequence[Tensor], dtype: torch.dtype, through: torch.dtype | None) -> list[Tensor]:
    _check(xs)
    wide = torch.promote_types(xs[0].dtype, torch.float32)
    return [x.sum(0, dtype=wide).to(through or wide).to(dtype) for x in xs]


def cuda(xs: Sequence[Tensor], dtype: torch.dtype, through: torch.dtype | None) -> list[Tensor]:
    if not on_gpu(*xs):
        return anywhere(xs, dtype, through)
    _check(xs)
    from .triton_sums import launch

    return [y for first in range(0, len(xs), MOST) for y in launch(xs[first : first + MOST], dtype, through)]


def fake(xs: Sequence[Tensor], dtype: torch.dtype, through: torch.dtype | None) -> list[Tensor]:
    _check(xs)
    return [x.new_empty(x.shape[1], dtype=dtype) for x in xs]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.like = [x.new_empty(0) for x in inputs[0]]
    ctx.shapes = [x.shape for x in inputs[0]]


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    each = zip(grads, ctx.shapes, ctx.like)
    return [like.new_zeros(n) if g is None else g.to(like.dtype).expand(n) for g, n, like in each], None, None


register(
    "sum_rows(Tensor[] xs, ScalarType dtype, ScalarType? through) -> Tensor[]",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
)  # fmt: skip
