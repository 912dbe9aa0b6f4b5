"""triptych::lce: a linear layer over the feature axis, y[b] = f(W x[b] + bias), which reads x in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .registry import Product, check, on_gpu, register

Tensor = torch.Tensor

EPILOGUES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
}


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> None:
    check(x.dim() == 3 and weight.dim() == 2, lambda: "lce takes x: (batch, n, d) and weight: (m, n)")
    check(x.shape[1] == weight.shape[1], lambda: f"{x.shape[1]} features, a weight for {weight.shape[1]}")
    check(x.dtype == weight.dtype, lambda: f"x is {x.dtype}, the weight {weight.dtype}")
    check(epilogue in EPILOGUES, lambda: f"no epilogue {epilogue!r}; there are {', '.join(EPILOGUES)}")
    if bias is not None:
        check(bias.dim() == 1, lambda: "the bias of lce is a vector")
        check(bias.shape[0] == weight.shape[0], lambda: "the bias has another size than the result")


def anywhere(x: Tensor, weight: Tensor, bias: Tensor | None = None, epilogue: str = "none",
             transposed: bool = False) -> Tensor:  # fmt: skip
    _check(x, weight, bias, epilogue)
    y = EPILOGUES[epilogue](F.linear(x.transpose(1, 2), weight, bias)).transpose(1, 2)
    return y if transposed else y.contiguous()


def cuda(x: Tensor, weight: Tensor, bias: Tensor | None = None, epilogue: str = "none",
         transposed: bool = False) -> Tensor:  # fmt: skip
    if not on_gpu(x, weight, bias):
        return anywhere(x, weight, bias, epilogue, transposed)
    _check(x, weight, bias, epilogue)
    from .triton_lce import launch

    return launch(x, weight, bias, epilogue, transposed)


def new_result(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """An empty tensor (batch, m, d); with `transposed`, it is laid out in memory as (batch, d, m), as the result of a
    linear layer is."""
    batch, _, d = x.shape
    m = weight.shape[0]
    return x.new_empty_strided((batch, m, d), (d * m, 1, m)) if transposed else x.new_empty(batch, m, d)


def fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, epilogue: str = "none",
         transposed: bool = False) -> Tensor:  # fmt: skip
    _check(x, weight, bias, epilogue)
    return new_result(x, weight, transposed)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.epilogue, _ = inputs
    # the derivative of the epilogue is computed from its result, or from its input, which is recomputed
    ctx.save_for_backward(x, weight, bias, output if ctx.epilogue in ("relu", "sigmoid", "tanh") else None)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, y = ctx.saved_tensors
    grad = _through_epilogue(grad, ctx.epilogue, x, weight, bias, y)
    grad_x = grad_w = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.triptych.lce(grad, weight.t())
    if ctx.needs_input_grad[1]:
        grad_w = torch.tensordot(grad, x, ([0, 2], [0, 2]))
    if bias is not None and ctx.needs_input_grad[2]:
        grad_b = grad.sum((0, 2))
    return grad_x, grad_w, grad_b, None, None


def _through_epilogue(grad: Tensor, epilogue: str, x: Tensor, weight: Tensor, bias: Tensor | None, y: Any) -> Tensor:
    if epilogue == "none":
        return grad
    if epilogue == "relu":
        return torch.where(y <= 0, 0, grad)
    if epilogue == "sigmoid":
        return grad * (y * (1 - y))
    if epilogue == "tanh":
        return grad * (1 - y * y)
    z = torch.ops.triptych.lce(x, weight, bias)
    if epilogue == "silu":
        s = torch.sigmoid(z)
        return grad * (s * (1 + z * (1 - s)))
    wide = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
    normal = torch.exp(-0.5 * wide * wide) * 0.3989422804014327
    return grad * (0.5 * (1 + torch.erf(wide * 0.7071067811865476)) + wide * normal).to(grad.dtype)


def products(x: Tensor, weight: Tensor, *others: Any) -> list[Product]:
    return [(x.shape[0] * x.shape[2], *weight.shape)]


register(
    "lce(Tensor x, Tensor weight, Tensor? bias=None, str epilogue='none', bool transposed=False) -> Tensor",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=products,
)  # fmt: skip
