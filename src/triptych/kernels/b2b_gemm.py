"""triptych::b2b_gemm: f(A B + bias) C with a pointwise f, where the middle matrix is never materialised."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .pointwise import Pointwise
from .registry import Product, check, gradients_of, on_gpu, register

Tensor = torch.Tensor

LARGEST_END = 256
"""The most columns of A and of the result for which a row of each stays in the registers of one program."""


@functools.lru_cache(maxsize=256)
def function(text: str) -> Pointwise:
    return Pointwise.read(text)


def _check(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, f: str) -> None:
    check(a.dim() == b.dim() == c.dim() == 2, lambda: "b2b_gemm takes three matrices")
    check(a.shape[1] == b.shape[0], lambda: f"A has {a.shape[1]} columns, B {b.shape[0]} rows")
    check(b.shape[1] == c.shape[0], lambda: f"B has {b.shape[1]} columns, C {c.shape[0]} rows")
    check(a.dtype == b.dtype == c.dtype, lambda: f"A is {a.dtype}, B {b.dtype}, C {c.dtype}")
    if bias is not None:
        check(bias.dim() == 1, lambda: "the bias is a vector, one number for each column of B")
        check(bias.shape[0] == b.shape[1], lambda: f"{bias.shape[0]} numbers of bias for {b.shape[1]} columns")
    function(f)


def anywhere(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, f: str, transposed: bool) -> Tensor:
    _check(a, b, c, bias, f)
    middle = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    result = torch.mm(function(f)(middle), c)
    return result.t().contiguous().t() if transposed else result


def cuda(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, f: str, transposed: bool) -> Tensor:
    if not on_gpu(a, b, c, bias) or max(a.shape[1], c.shape[1]) > LARGEST_END:
        return anywhere(a, b, c, bias, f, transposed)
    _check(a, b, c, bias, f)
    from .triton_b2b_gemm import launch

    return launch(a, b, c, bias, function(f), _empty(a, c, transposed))


def fake(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, f: str, transposed: bool) -> Tensor:
    _check(a, b, c, bias, f)
    return _empty(a, c, transposed)


def _empty(a: Tensor, c: Tensor, transposed: bool) -> Tensor:
    rows, columns = a.shape[0], c.shape[1]
    return a.new_empty_strided((rows, columns), (1, rows)) if transposed else a.new_empty(rows, columns)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, c, bias, ctx.f, ctx.transposed = inputs
    ctx.save_for_backward(a, b, c, bias)


def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Recomputes the middle matrix with torch. Passes emit the operator after autograd, so this is only for users who
    call the operator directly."""
    wanted = [i for i in range(4) if ctx.needs_input_grad[i]]

    def result(*tensors: Any) -> Tensor:
        arguments = *tensors, ctx.f, ctx.transposed
        return anywhere(*arguments)

    return *gradients_of(result, ctx.saved_tensors, wanted, grad), None, None


def products(a: Tensor, b: Tensor, c: Tensor, *others: Any) -> list[Product]:
    return [(a.shape[0], b.shape[1], a.shape[1]), (a.shape[0], c.shape[1], b.shape[1])]


register(
    "b2b_gemm(Tensor a, Tensor b, Tensor c, Tensor? bias, str f, bool transposed) -> Tensor",
    anywhere=anywhere, cuda=cuda, fake=fake, backward=backward, save=save,
    products=products,
)  # fmt: skip
