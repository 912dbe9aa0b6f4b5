"""triptych::norm_backward: the gradients of a layer norm, with the sums over rows that its weights and a bias need.

    dx    = rstd * (g * weight - mean(g * weight) - xhat * mean(g * weight * xhat)) + added; xhat = (x - mean) * rstd
    parts = [sums of g * xhat | sums of g | sums of dx], each over `rows_a_part` rows

g is `grad`, or `grad + other_grad`. Means are over the last dim. `parts` has a row for each part, and two or three
blocks of columns: that of dx is there only if `with_result_sums` is true. Everything is computed in float32, or in
float64 if x has that dtype. As in separate operations, `grad + other_grad` is rounded to their dtype, and dx is rounded
to the dtype of x before `added` is added and again after it; the sums of dx are those of the rounded numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .registry import KERNEL_DTYPES, check, gradients_of, no_products, register, triton_is_there

Tensor = torch.Tensor

LARGEST_ROW = 8192
"""The most columns for which a row stays in the registers of one program."""


def _check(
    grad: Tensor, other_grad: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    added: Tensor | None, rows_a_part: int,
) -> None:  # fmt: skip
    check(rows_a_part > 0, lambda: f"a part has at least one row, not {rows_a_part}")
    given = [t for t in (grad, other_grad, x, mean, rstd, weight, added) if t is not None]
    check(all(t.is_floating_point() for t in given), lambda: "norm_backward takes floating-point numbers")
    check(all(t.device == x.device for t in given), lambda: "norm_backward takes tensors of one device")
    check(x.dim() >= 2, lambda: "x has at least two dims")
    check(grad.shape == x.shape, lambda: f"the gradient is {list(grad.shape)}, x {list(x.shape)}")
    if other_grad is not None:
        is_like = other_grad.shape == grad.shape and other_grad.dtype == grad.dtype
        check(is_like, lambda: "the other gradient has the shape and dtype of the first")
    for statistic in (mean, rstd):
        check(statistic.shape == (*x.shape[:-1], 1), lambda: "there is one mean and one rstd for each row")
    check(weight.shape == x.shape[-1:], lambda: "there is one weight for each column")
    if added is not None:
        check(added.shape == x.shape and added.dtype == x.dtype, lambda: "what is added has the shape and dtype of x")


def parts_of(x: Tensor, rows_a_part: int) -> Any:
    """The number of parts; the last one may have fewer rows."""
    rows = math.prod(x.shape[:-1])
    return (rows + rows_a_part - 1) // rows_a_part


def anywhere(
    grad: Tensor, other_grad: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    added: Tensor | None, rows_a_part: int, with_result_sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(grad, other_grad, x, mean, rstd, weight, added, rows_a_part)
    wide = torch.promote_types(x.dtype, torch.float32)
    g = (grad if other_grad is None else grad + other_grad).to(wide)
    rstd = rstd.to(wide)
    xhat = (x.to(wide) - mean.to(wide)) * rstd
    weighted = g * weight.to(wide)
    dx = rstd * (weighted - weighted.mean(-1, keepdim=True) - xhat * (weighted * xhat).mean(-1, keepdim=True))
    dx = dx.to(x.dtype) if added is None else dx.to(x.dtype) + added
    summed = [g * xhat, g, dx.to(wide)] if with_result_sums else [g * xhat, g]
    parts = [sums_of_parts(m, rows_a_part) for m in summed]
    return dx.contiguous(), torch.cat(parts, 1)


def sums_of_parts(matrix: Tensor, rows_a_part: int) -> Tensor:
    """The sums of every `rows_a_part` rows."""
    rows, columns = math.prod(matrix.shape[:-1]), matrix.shape[-1]
    missing = -rows % rows_a_part
    padded = torch.nn.functional.pad(matrix.reshape(rows, columns), (0, 0, 0, missing))
    return padded.reshape(padded.shape[0] // rows_a_part, rows_a_part, columns).sum(1)


def has_kernel(*given: Tensor | None) -> bool:
    """Does the Triton kernel compute this? The operands are those of the operator."""
    there = [t for t in given if t is not None]
    columns = there[0].shape[-1]
    fits = columns <= LARGEST_ROW and all(t.is_cuda and t.dtype in KERNEL_DTYPES for t in there)
    return fits and triton_is_there()


def cuda(
    grad: Tensor, other_grad: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    added: Tensor | None, rows_a_part: int, with_result_sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not has_kernel(grad, other_grad, x, mean, rstd, weight, added):
        return anywhere(grad, other_grad, x, mean, rstd, weight, added, rows_a_part, with_result_sums)
    _check(grad, other_grad, x, mean, rstd, weight, added, rows_a_part)
    from .triton_norm_backward import launch

    dx, parts = fake(grad, other_grad, x, mean, rstd, weight, added, rows_a_part, with_result_sums)
    return launch(grad, other_grad, x, mean, rstd, weight, added, rows_a_part, with_result_sums, dx, parts)


def fake(
    grad: Tensor, other_grad: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    added: Tensor | None, rows_a_part: int, with_result_sums: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(grad, other_grad, x, mean, rstd, weight, added, rows_a_part)
    blocks = 3 if with_result_sums else 2
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty((parts_of(x, rows_a_part), blocks * x.shape[-1]), dtype=wide)


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.rows_a_part, ctx.with_result_sums = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Differentiates the definition. Passes emit the operator after autograd, so this is only for users who call the
    operator directly."""
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:7]) if needed]

    def results(*tensors: Any) -> tuple[Tensor, Tensor]:
        arguments = *tensors, ctx.rows_a_part, ctx.with_result_sums
        return anywhere(*arguments)

    return *gradients_of(results, ctx.saved_tensors, wanted, grads), None, None


register(
    "norm_backward(Tensor grad, Tensor? other_grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? added, "
    "int rows_a_part, bool with_result_sums) -> (Tensor, Tensor)",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=no_products,
)  # fmt: skip
