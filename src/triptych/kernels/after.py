"""triptych::after: a copy of a tensor that is made after other tensors have been computed.

Inductor may run independent operations in any order, and fuses kernels that read the same values. Work that is split to
save memory must stay in its order: each part starts from a copy that waits for the previous part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .registry import no_products, register

Tensor = torch.Tensor


def anywhere(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.others = len(inputs[1])


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad, [None] * ctx.others


register(
    "after(Tensor x, Tensor[] others) -> Tensor",
    anywhere=anywhere, cuda=anywhere, fake=anywhere, backward=backward, save=save,
    products=no_products,
)  # fmt: skip
