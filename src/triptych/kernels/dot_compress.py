"""triptych::dot_compress: x (x^T w), the compressed dot products of all pairs of rows, which are never materialised."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Product, check, on_gpu, register

Tensor = torch.Tensor

LARGEST_D = 256
"""The largest d for which x^T w stays in the registers of one program; for larger d two products are better."""


def _check(x: Tensor, w: Tensor) -> None:
    check(x.dim() == 3, lambda: "dot_compress takes x: (batch, n, d)")
    check(w.dim() in (2, 3), lambda: "dot_compress takes w: (n, k) or (batch, n, k)")
    check(x.shape[1] == w.shape[-2], lambda: f"{x.shape[1]} rows, weights for {w.shape[-2]}")
    check(x.dtype == w.dtype, lambda: f"x is {x.dtype}, w {w.dtype}")
    if w.dim() == 3:
        check(x.shape[0] == w.shape[0], lambda: "x and w are of different batches")


def anywhere(x: Tensor, w: Tensor) -> Tensor:
    _check(x, w)
    return torch.matmul(x, torch.matmul(x.transpose(1, 2), w)).contiguous()


def cuda(x: Tensor, w: Tensor) -> Tensor:
    if not on_gpu(x, w) or x.shape[2] > LARGEST_D:
        return anywhere(x, w)
    _check(x, w)
    from .triton_dot_compress import launch

    return launch(x, w)


def fake(x: Tensor, w: Tensor) -> Tensor:
    _check(x, w)
    return x.new_empty(x.shape[0], x.shape[1], w.shape[-1])


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        turned = x.transpose(1, 2)
        grad_x = torch.matmul(grad, torch.matmul(turned, w).transpose(1, 2))
        grad_x = grad_x + torch.matmul(w, torch.matmul(turned, grad).transpose(1, 2))
    if ctx.needs_input_grad[1]:
        grad_w = torch.ops.triptych.dot_compress(x, grad)
        grad_w = grad_w.sum(0) if w.dim() == 2 else grad_w
    return grad_x, grad_w


def products(x: Tensor, w: Tensor) -> list[Product]:
    batch, n, d = x.shape
    return [(batch * d, w.shape[-1], n), (batch * n, w.shape[-1], d)]


register(
    "dot_compress(Tensor x, Tensor w) -> Tensor",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=products,
)  # fmt: skip
