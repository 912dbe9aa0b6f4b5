"""Integers that depend on sizes and indices alone are those of their dtype: they wrap around and are rounded."""

from __future__ import annotations

import pytest
import torch

import triptych

NARROW = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float32]


def compiled(function, dynamic=False):
    # nothing is folded: the kernels have to compute it
    options = {"remove_passes": ["constant_fold_uniform_value"], "on_error": "raise"}
    return torch.compile(function, backend=triptych.compile_fx, options=options, dynamic=dynamic)


def check(function, *inputs, dynamic=False):
    for want, got in zip(function(*inputs), compiled(function, dynamic)(*inputs), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want), f"{got} for {want}"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_casts_of_indices(dtype, dynamic):
    wide = torch.float64 if dtype.is_floating_point else torch.int64

    def function(x):
        n = x.shape[0]
        indices = torch.arange(n) + 2**24 + 253
        narrow = indices.to(dtype)
        below = (torch.arange(n) - n).to(dtype) if dtype != torch.uint8 else narrow
        return narrow.to(wide), narrow.sum(dtype=torch.float64), below.to(wide) * 2

    check(function, torch.rand(20), dynamic=dynamic)


def test_arithmetic_on_narrow_indices():
    def function(x):
        signed, unsigned = torch.arange(9, dtype=torch.int8), torch.arange(9, dtype=torch.uint8)
        wide = torch.int64
        return (signed * 100).to(wide), (signed + 100 + 100).to(wide), (unsigned - 2).to(wide), (-unsigned).to(wide), x + 1

    check(function, torch.rand(9))


FILLS = {
    "full": lambda x, n, dtype: torch.full((4,), n, dtype=dtype),
    "full_like": lambda x, n, dtype: torch.full_like(x, n, dtype=dtype),
    "new_full": lambda x, n, dtype: x.new_full((4,), n, dtype=dtype),
    "fill": lambda x, n, dtype: torch.empty(4, dtype=dtype).fill_(n),
    "scalar_tensor": lambda x, n, dtype: torch.scalar_tensor(n, dtype=dtype),
    "masked_fill": lambda x, n, dtype: x.to(dtype).masked_fill(x > 0, n),
    "index_fill": lambda x, n, dtype: x.to(dtype).index_fill(0, torch.tensor([1]), n),
    "scatter": lambda x, n, dtype: x.to(dtype).scatter(0, torch.tensor([1]), n),
    "pad": lambda x, n, dtype: torch.constant_pad_nd(x.to(dtype), [1, 1], n),
    "cast": lambda x, n, dtype: (torch.ones(4, dtype=torch.int64) * n).to(dtype),
}


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16], ids=str)
def test_fills_with_a_symbolic_number(dtype, codegen):
    def function(x, n):
        filled = [fill(x, n, dtype) for fill in FILLS.values()]
        return [*filled, *(f.to(torch.int64) * 1 for f in filled), *(f.sum(dtype=torch.int64) for f in filled)]

    options = {"codegen": codegen, "on_error": "raise"}
    call = torch.compile(function, backend=triptych.compile_fx, options=options, dynamic=True)
    x = torch.tensor([1.0, 0.0, -2.0, 3.0])
    for n in (3, 77):
        for want, got in zip(function(x, n), call(x, n), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_symbolic_bounds_widen_what_they_clamp(codegen):
    def function(x, n):
        flags, integers = x > 0, x.to(torch.int32)
        return (flags.clamp(max=n), flags.clamp(min=n), flags.clamp_max(n), flags.clamp_min(n), integers.clamp(max=n),
                integers.clamp(max=n / 2), integers.clamp_max(n / 2), x.clamp(max=n))  # fmt: skip

    options = {"codegen": codegen, "on_error": "raise"}
    call = torch.compile(function, backend=triptych.compile_fx, options=options, dynamic=True)
    x = torch.tensor([1.0, 0.0, -2.0, 3.0])
    for want, got in zip(function(x, 3), call(x, 3), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_programs_of_others_are_compiled_as_before():
    """The correction applies to programs of ours alone."""

    def function(x):
        return (torch.arange(3, 7) + x.shape[0]).to(torch.bool).sum()

    x = torch.rand(4)
    before = torch.compile(function)(x)
    assert compiled(function)(x) == function(x) == 4
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function)(x), before)
