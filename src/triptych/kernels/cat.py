"""triptych::cat: concatenates many tensors by one launch of torch's own kernel.

For many operands Inductor generates one kernel that finds out for each element which operand it comes from, or one
kernel for each operand: both are slow where the operands are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import no_products, register

Tensor = torch.Tensor


def anywhere(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(tensors), dim)


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.dim = inputs
    ctx.sizes = [t.shape[ctx.dim] for t in tensors]


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return list(grad.split(ctx.sizes, ctx.dim)), None


register(
    "cat(Tensor[] tensors, int dim) -> Tensor",
    anywhere=anywhere, cuda=anywhere, fake=anywhere, backward=backward, save=save,
    products=no_products,
)  # fmt: skip
