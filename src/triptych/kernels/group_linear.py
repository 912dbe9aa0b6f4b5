"""triptych::group_linear: linear layers of any sizes, each over its own input, in one launch.

`biases` is empty, or has one for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .parallel_linear import as_rows
from .registry import Product, check, on_gpu, register, rows_of

Tensor = torch.Tensor

MOST = 8
"""The most layers in one launch; more layers take several launches."""


def _check(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    check(len(xs) == len(weights), lambda: "group_linear takes a weight for each input")
    check(len(biases) in (0, len(xs)), lambda: "group_linear takes a bias for each input, or none at all")
    for x, weight in zip(xs, weights):
        check(x.dim() >= 1 and weight.dim() == 2, lambda: "group_linear takes x: (..., n) and w: (m, n)")
        check(weight.shape[1] == x.shape[-1], lambda: "a weight does not fit its input")
        check(weight.dtype == x.dtype, lambda: "a weight is not of its input's dtype")
    for bias, weight in zip(biases, weights):
        check(bias.dim() == 1, lambda: "every bias is a vector")
        check(bias.shape[0] == weight.shape[0], lambda: "a bias has another size than its result")


def anywhere(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    _check(xs, weights, biases)
    each: Sequence[Tensor | None] = biases or [None] * len(xs)
    return [F.linear(x, weight, bias) for x, weight, bias in zip(xs, weights, each)]


def cuda(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    if not on_gpu(*xs, *weights, *biases):
        return anywhere(xs, weights, biases)
    _check(xs, weights, biases)
    from .triton_linears import launch

    each: Sequence[Tensor | None] = biases or [None] * len(xs)
    parts = [slice(first, first + MOST) for first in range(0, len(xs), MOST)]
    return [made for part in parts for made in launch(xs[part], weights[part], each[part])]


def fake(xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    _check(xs, weights, biases)
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for x, weight in zip(xs, weights)]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    xs, weights, biases = inputs
    ctx.wants = [[t.requires_grad for t in tensors] for tensors in (xs, weights, biases)]
    ctx.save_for_backward(*xs, *weights)


def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    xs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    wants_x, wants_w, wants_b = ctx.wants
    grad_x = [g @ w if g is not None and wanted else None for g, w, wanted in zip(grads, weights, wants_x)]
    grad_w = [
        as_rows(g).t() @ as_rows(x) if g is not None and wanted else None for g, x, wanted in zip(grads, xs, wants_w)
    ]
    grad_b = [as_rows(g).sum(0) if g is not None and wanted else None for g, wanted in zip(grads, wants_b)]
    return grad_x, grad_w, grad_b


def products(xs: Sequence[Tensor], weights: Sequence[Tensor], *others: Any) -> list[Product]:
    return [(rows_of(x), *weight.shape) for x, weight in zip(xs, weights)]


register(
    "group_linear(Tensor[] xs, Tensor[] weights, Tensor[] biases) -> Tensor[]",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=products,
)  # fmt: skip
