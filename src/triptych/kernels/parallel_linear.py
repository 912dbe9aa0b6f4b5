"""triptych::parallel_linear: several linear layers over one input in one launch, which reads every weight in place.

`biases` belong, in order, to the layers whose numbers are in `biased`; if that is None, all layers have a bias, or
none has. (A list with None in it would say the same, but torch supports no gradients for such a list, nor, beside
lists, for arguments that are left out for their default.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .registry import Product, check, on_gpu, register, rows_of

Tensor = torch.Tensor

MOST = 8
"""The most weights in one launch; more weights take several launches."""


def bias_of_each(
    weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[int] | None
) -> list[Tensor | None]:
    """One entry for each layer: its bias or None."""
    numbers = list(range(len(weights)) if biases else ()) if biased is None else list(biased)
    check(
        len(numbers) == len(biases) and all(0 <= i < len(weights) for i in numbers),
        lambda: f"{len(biases)} biases for the layers {numbers} of {len(weights)}",
    )
    of_layer = dict(zip(numbers, biases))
    return [of_layer.get(i) for i in range(len(weights))]


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    check(x.dim() >= 1, lambda: "parallel_linear takes x: (..., n)")
    for weight, bias in zip(weights, biases):
        check(weight.dim() == 2, lambda: "every weight is a matrix (m, n)")
        check(weight.shape[1] == x.shape[-1], lambda: "a weight does not fit the input")
        check(weight.dtype == x.dtype, lambda: "the weights are of the input's dtype")
        if bias is not None:
            check(bias.dim() == 1, lambda: "every bias is a vector")
            check(bias.shape[0] == weight.shape[0], lambda: "a bias has another size than its result")


def as_rows(x: Tensor) -> Tensor:
    """(..., n) as (rows, n). The number of rows is given explicitly, because -1 is ambiguous where n is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def anywhere(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[int] | None
) -> list[Tensor]:
    each = bias_of_each(weights, biases, biased)
    _check(x, weights, each)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, each)]


def cuda(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[int] | None
) -> list[Tensor]:
    if not on_gpu(x, *weights, *biases):
        return anywhere(x, weights, biases, biased)
    each = bias_of_each(weights, biases, biased)
    _check(x, weights, each)
    from .triton_linears import launch

    made: list[Tensor] = []
    for first in range(0, len(weights), MOST):
        part = slice(first, first + MOST)
        made += launch([x] * len(weights[part]), weights[part], each[part])
    return made


def fake(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], biased: Sequence[int] | None
) -> list[Tensor]:
    _check(x, weights, bias_of_each(weights, biases, biased))
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, biases, biased = inputs
    each = bias_of_each(weights, biases, biased)
    ctx.wants_weight = [weight.requires_grad for weight in weights]
    ctx.no_numbers = [] if biased is not None and not biased else None
    ctx.biased = [i for i, bias in enumerate(each) if bias is not None]
    ctx.wants_bias = [bias.requires_grad for bias in biases]
    ctx.save_for_backward(x, *weights)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    rows = as_rows(x)
    flat = [None if g is None else as_rows(g) for g in grads]
    grad_x: Any = None
    if ctx.needs_input_grad[0]:
        for grad, weight in zip(flat, weights):
            if grad is not None:
                part = grad @ weight
                grad_x = part if grad_x is None else grad_x + part
        grad_x = None if grad_x is None else grad_x.reshape(x.shape)
    grad_w = [g.t() @ rows if g is not None and wanted else None for g, wanted in zip(flat, ctx.wants_weight)]
    with_bias = [flat[i] for i in ctx.biased]
    grad_b = [g.sum(0) if g is not None and wanted else None for g, wanted in zip(with_bias, ctx.wants_bias)]
    return grad_x, grad_w, grad_b, ctx.no_numbers  # torch treats an empty list as a list of tensors


def products(x: Tensor, weights: Sequence[Tensor], *others: Any) -> list[Product]:
    return [(rows_of(x), *weight.shape) for weight in weights]


register(
    "parallel_linear(Tensor x, Tensor[] weights, Tensor[] biases, int[]? biased) -> Tensor[]",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=products,
)  # fmt: skip
