"""Operators that Inductor's kernels compute otherwise than eager are as in eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import triptych


def check(function, *inputs, **tolerances):
    """The same values and dtypes as in eager."""
    compiled = torch.compile(function, backend=triptych.compile_fx, options={"on_error": "raise"})
    torch.testing.assert_close(compiled(*inputs), function(*inputs), equal_nan=True, **tolerances)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_extremes_of_bytes(dtype):
    """More numbers than fit a part of a vector, all on one side of 0: a lane that is not filled would win."""

    def function(x, y):
        return [
            *((v.amin(1), v.amax(1), v.argmin(1), v.argmax(0), v.min(), v.max(), v.argmax()) for v in (x, y)),
            *((*v.min(1), *v.max(0, keepdim=True), *torch.aminmax(v, dim=1)) for v in (x, y)),
        ]

    x = torch.randint(1, 100, (7, 37), dtype=dtype)
    check(function, x, -x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("given", [torch.uint8, torch.int8, torch.int64], ids=str)
def test_totals_in_bytes_wrap_around(given, dtype):
    def function(x):
        return x.sum(1, dtype=dtype), x.sum(dtype=dtype), x.sum((0, 1), True, dtype=dtype), (x | 1).prod(0, dtype=dtype)

    check(function, torch.randint(0, 256, (7, 37)).to(given))


def test_any_of_bytes_is_a_byte():
    x = torch.randint(0, 3, (5, 40), dtype=torch.uint8) * torch.tensor([[0], [1], [0], [2], [1]], dtype=torch.uint8)
    check(lambda x: (x.any(), x.any(1), x.any(0, keepdim=True), torch.any(x, (0, 1)), x.all(1), (x > 1).any(1)), x)


def test_scalar_without_dtype_has_the_default_one():
    def function(x):
        return torch.scalar_tensor(2) * x, torch.scalar_tensor(True), torch.scalar_tensor(x.shape[0], dtype=torch.int8)

    check(function, torch.arange(3))


NUMBERS = {
    torch.bool: torch.ones(3, 20, dtype=torch.bool),
    torch.int64: torch.randint(1, 4, (3, 20)),
    torch.float16: torch.randn(3, 20).half(),
    torch.bfloat16: torch.randn(3, 20).bfloat16(),
    torch.float32: torch.randn(3, 20),
    torch.float64: torch.randn(3, 20).double(),
}


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_ldexp_has_the_dtype_of_both(dtype):
    """A power of two in half precision is rounded in eager, and not in a kernel."""
    exponents = [e for e in NUMBERS.values() if e.dtype != torch.bool or not dtype.is_floating_point]  # eager raises
    check(lambda x, *exponents: [torch.ldexp(x, e) for e in exponents], NUMBERS[dtype], *exponents, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_remainder_of_infinite_and_large_quotients(dtype):
    x = torch.tensor([7.5, -7.5, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, 123456.0, -98765.0, 0.5, 3.0], dtype=dtype)
    divisors = torch.tensor([math.inf, math.inf, 2.0, -2.0, 3.0, 3.0, 1.0, 7.0, 0.1, 0.3, -math.inf, -3.0], dtype=dtype)

    def function(x, divisors):
        return x % divisors, divisors % x, x % 6.283185307179586, x % -3, x % math.inf, 5.5 % divisors, x % divisors[1]

    check(function, x, divisors, rtol=0, atol=0)
    check(function, x.repeat(3), divisors.repeat(3), rtol=0, atol=0)


def test_remainder_of_integers_and_floats():
    x = torch.arange(-20, 20)
    check(lambda x: (x % 7, x % -7, x % 2.5, 100 % (x.abs() + 1), 2.5 % (x.abs() + 1), x.to(torch.int8) % 3), x)


def test_gradient_of_remainder():
    x, divisor = torch.randn(20) * 10, torch.rand(20) + 1
    gradients = []
    for function in (torch.remainder, torch.compile(torch.remainder, backend=triptych.compile_fx)):
        leaves = [v.clone().requires_grad_() for v in (x, divisor)]
        gradients.append(torch.autograd.grad((function(*leaves) * x).sum(), leaves))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("pool, shape, how", [
    (F.avg_pool1d, (2, 3, 7), {"kernel_size": 2, "stride": 2}),
    (F.avg_pool2d, (2, 3, 8, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (F.avg_pool2d, (3, 5, 5), {"kernel_size": (2, 3)}),
    (F.avg_pool2d, (2, 3, 8, 9), {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    (F.avg_pool2d, (2, 3, 8, 9), {"kernel_size": 3, "stride": 2, "divisor_override": 5}),
    (F.avg_pool3d, (2, 3, 5, 7, 6), {"kernel_size": 3, "stride": 2, "padding": 1}),
])  # fmt: skip
def test_gradients_of_windows_that_reach_beyond_the_input(pool, shape, how):
    def gradient(x, weight):
        return torch.autograd.grad((pool(x, ceil_mode=True, **how) * weight).sum(), x)[0]

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(pool(x, ceil_mode=True, **how))
    compiled = torch.compile(lambda x: pool(x, ceil_mode=True, **how), backend=triptych.compile_fx, options={"on_error": "raise"})
    (got,) = torch.autograd.grad((compiled(x) * weight).sum(), x)
    torch.testing.assert_close(got, gradient(x, weight))
