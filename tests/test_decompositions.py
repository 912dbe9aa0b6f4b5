"""Operators that torch's decompositions would change are as in eager, with both code generators."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych import _private
from triptych.codegen.base import portable_decompositions
from triptych.codegen.decompositions import corrected

CODEGENS = ["eager", "inductor"]


def compiled(function, codegen, dynamic=False, on_error="raise"):
    options = {"codegen": codegen, "on_error": on_error}
    return torch.compile(function, backend=triptych.compile_fx, options=options, dynamic=dynamic)


def without_bias(m, k, n):
    """Products whose bias is not read: with beta=0 it may be anything, even NaN."""
    bias = torch.full((m, n), math.nan)

    def function(a, b, v, w):
        batch = a.expand(2, m, k), b.expand(2, k, n)
        return (
            torch.addmm(bias, a, b, beta=0),
            torch.addmm(bias[:1], a, b, beta=0, alpha=2),
            torch.baddbmm(bias, *batch, beta=0),
            torch.addbmm(bias, *batch, beta=0),
            torch.addmv(bias[:, 0], a, v, beta=0),
            torch.addr(bias, a[:, 0], w, beta=0),
        )

    return function, (torch.randn(m, k), torch.randn(k, n), torch.randn(k), torch.randn(n))


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("sizes", [(1, 4, 1), (1, 4, 3)], ids=str)
def test_bias_is_not_read_at_beta_zero(sizes, codegen):
    function, inputs = without_bias(*sizes)
    for want, got in zip(function(*inputs), compiled(function, codegen)(*inputs)):
        assert not want.isnan().any()
        torch.testing.assert_close(got, want)


def with_factors_of_zero(nothing):
    """Products of operands that contain NaN or infinity, times zero, in sizes for which eager has other kernels."""
    factors = [{"alpha": 0}, {"beta": 0}, {"alpha": 0, "beta": 2}, {"alpha": 0.0, "beta": 0.0}]

    def function(flat, matrix, row, column, batch, beside):
        sides = (row, 1), (1, column), (row, column), (1, 1)
        results = []
        for each in factors:
            full = (beside[:m, :n] * (math.nan if each.get("beta") == 0 else 1) for m, n in sides)
            results += [torch.addmm(b, matrix[: len(b)] * nothing, matrix.t()[:, : b.shape[1]], **each) for b in full]
            both = each == {"alpha": 0.0, "beta": 0.0}
            if both and flat.dtype is torch.bfloat16:  # of large matrices, eager returns uninitialised memory
                results.append(torch.addbmm(beside, batch * nothing, batch.mT, **each))
                continue
            if "alpha" in each:
                results.append(torch.addmv(beside[:, 0] if each.get("beta") != 0 else beside[:, 0] * math.nan,
                                           matrix * nothing, flat, **each))  # fmt: skip
            results.append(torch.baddbmm(beside.expand(2, -1, -1), batch * nothing, batch.mT, **each))
            results.append(torch.addbmm(beside, batch * nothing, batch.mT, **each))
            results.append(torch.addr(beside, flat * nothing, flat, **each))
        return results

    return function


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("nothing, size", [(math.nan, 5), (math.nan, 70), (math.inf, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_multiplied_by_zero_is_read_where_eager_reads_it(dtype, size, nothing, codegen):
    flat, matrix, batch = torch.rand(size), torch.rand(size, size), torch.rand(2, size, size)
    given = [x.to(dtype) for x in (flat, matrix)], size - 1, size - 2, *(x.to(dtype) for x in (batch, matrix))
    (flat, matrix), *rest = given
    function = with_factors_of_zero(nothing)
    wanted = function(flat, matrix, *rest)
    for number, (want, got) in enumerate(zip(wanted, compiled(function, codegen)(flat, matrix, *rest), strict=True)):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0.05, atol=0.05, msg=lambda m, n=number: f"{n}: {m}")


def pointwise_of_two_layouts(x, y):
    """Of operands in different layouts; the last two are also broadcast."""
    cross_entropy = torch.nn.functional.binary_cross_entropy
    return (
        *(torch.fmax(x, y), torch.fmin(y, x), torch.xlogy(x, y), torch.special.xlog1py(y, x), torch.lerp(x, x, y)),
        *(torch.lerp(y, x, x), torch.lerp(x[:1], y, y), cross_entropy(x, y, x, reduction="none"), cross_entropy(x, y)),
        *(torch.fmax(x[:1], y), torch.xlogy(y, x[:, :1])),
    )


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_have_the_layout_of_the_first_operand(codegen, dynamic):
    inputs = torch.rand(4, 6), torch.rand(6, 4).t()
    call = compiled(pointwise_of_two_layouts, codegen, dynamic)
    for want, got in zip(pointwise_of_two_layouts(*inputs), call(*inputs)):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_results_have_the_layout_of_the_operand(codegen):
    def function(image, turned):
        rolled = torch.roll(image, -1, 0)
        put = turned.put(torch.tensor([0, 7]), torch.tensor([1.0, 2.0]))
        return rolled, torch.roll(turned, (1, 2), (0, 1)), torch.roll(turned, 3), put

    inputs = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(6, 4).t()
    for want, got in zip(function(*inputs), compiled(function, codegen)(*inputs)):
        assert got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_one_tensor_several_times_has_the_strides_of_eager(codegen):
    def function(image, turned):
        return torch.cat([image] * 2, 1), torch.cat([image] * 3, 2), torch.cat([turned] * 2), torch.cat([turned] * 2, 1)

    inputs = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(1, 3, 4).transpose(1, 2)
    for want, got in zip(function(*inputs), compiled(function, codegen)(*inputs)):
        assert got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("source", [torch.ones(2, 1), torch.ones(2), torch.ones(2, 4, dtype=torch.int64)], ids=["wide", "flat", "integers"])
def test_index_add_refuses_what_eager_refuses(source, codegen):
    def function(x, index, source):
        return x.index_add(0, index, source)

    inputs = torch.zeros(3, 4), torch.tensor([0, 2]), source
    # what falls back to torch's own compiler would get its decompositions, and return
    for run in (function, compiled(function, codegen, on_error="fallback")):
        with pytest.raises(RuntimeError, match="source"):
            run(*inputs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_index_add_takes_what_eager_takes(dynamic):
    def function(x, index, source):
        return x.index_add(-1, index, source, alpha=2), x[0, 0].index_add(0, index[0], source[0, 0])

    inputs = torch.zeros(3, 4), torch.tensor([0, 2]), torch.randn(3, 2)
    torch.testing.assert_close(compiled(function, "eager", dynamic)(*inputs), function(*inputs))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("codegen", CODEGENS)
def test_index_fill_has_the_strides_of_a_copy(codegen, dynamic):
    """Of operands that are transposed, have gaps, both, or repeat their elements."""

    def function(x):
        views = x, x.t(), x[:, ::2], x.t()[:, ::2], x[:1].expand(4, 6)
        return tuple(v.index_fill(0, torch.tensor([1]), 2.0) for v in views)

    x = torch.randn(4, 6)
    for want, got in zip(function(x), compiled(function, codegen, dynamic)(x)):
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("codegen", CODEGENS)
def test_round_to_decimals_refuses_integers(codegen):
    def function(x):
        return torch.round(x, decimals=-1)

    for run in (function, compiled(function, codegen, on_error="fallback")):
        with pytest.raises(Exception, match="not implemented for"):
            run(torch.arange(5))


@pytest.mark.parametrize(
    "dtype, codegen",
    [(torch.float32, "eager"), (torch.bfloat16, "eager"), (torch.float32, "inductor"), (torch.float64, "inductor")],
)
def test_round_to_decimals_is_bit_exact(dtype, codegen):
    x = torch.randn(500, dtype=torch.float64).mul(1e3).to(dtype)

    def function(x):
        return torch.round(x, decimals=3), torch.round(x, decimals=-2), torch.special.round(x)

    for want, got in zip(function(x), compiled(function, codegen)(x)):
        assert torch.equal(want, got)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_sum_of_empty_complex_tensors(codegen):
    x, y = torch.zeros(0, 3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64)
    got = compiled(torch.add, codegen)(x, y)
    assert got.shape == (0, 3) and got.dtype == torch.complex64


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_unpooling_keeps_the_memory_format(memory_format, codegen):
    def function(x):
        pooled, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
        return torch.nn.functional.max_unpool2d(pooled, indices, 2)

    x = torch.randn(2, 3, 4, 6).contiguous(memory_format=memory_format)
    want, got = function(x), compiled(function, codegen)(x)
    assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-1)])
def test_gradient_of_a_small_soft_margin_loss(dtype, tolerance, reduction):
    def gradient(function, x):
        x = x.clone().requires_grad_()
        function(x).sum().backward()
        return x.grad.double()

    def function(x):
        return torch.nn.functional.soft_margin_loss(x, torch.ones_like(x), reduction=reduction)

    x = torch.tensor([-3.0, 0.0, 8.0, 15.0, 30.0], dtype=dtype)
    exact = gradient(function, x.double())
    torch.testing.assert_close(gradient(compiled(function, "eager"), x), exact, rtol=tolerance, atol=0.0)


def test_double_precision_gradient_of_hardsigmoid_is_that_of_eager():
    gradients = []
    for function in (torch.nn.functional.hardsigmoid, compiled(torch.nn.functional.hardsigmoid, "eager")):
        x = torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True)
        function(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grid_sample_reads_from_the_same_places_as_eager(dtype):
    x, grid = torch.randn(1, 2, 6, 6, dtype=dtype), torch.rand(1, 5, 5, 2).to(dtype) * 2 - 1

    def function(x, grid):
        return torch.nn.functional.grid_sample(x, grid, align_corners=False)

    torch.testing.assert_close(compiled(function, "eager")(x, grid), function(x, grid))


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interpolation_of_16_bit_numbers_is_rounded_once(dtype, codegen):
    start, end = torch.randn(2, 1000).to(dtype)

    def function(start, end):
        return torch.lerp(start, end, 0.3), torch.lerp(start, end, end), torch.lerp(start, end, 70000)

    for got, want in zip(compiled(function, codegen)(start, end), function(start, end)):
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)  # float32 may be contracted


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", [0.3, 1.7, 3, [0.3, 1.7], [3, -0.7]], ids=str)
def test_interpolation_of_lists_is_rounded_once(weights, dtype, codegen):
    starts, ends = ([x.to(dtype) for x in torch.rand(2, 300) + 0.3] for _ in range(2))

    def function(starts, ends):
        return torch._foreach_lerp(starts, ends, weights)

    for got, want in zip(compiled(function, codegen)(starts, ends), function(starts, ends)):
        if codegen == "eager":
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("number", [0.3, 3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max"])
def test_numbers_beside_lists_of_tensors_are_not_rounded(name, dtype, number):
    values = [x.to(dtype) for x in torch.rand(2, 300) + 0.3]
    operator = getattr(torch, f"_foreach_{name}")

    def function(values):
        return [*operator(values, number), *operator(values, [number, number + 0.1])]

    for got, want in zip(compiled(function, "eager")(values), function(values), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_gradient_of_a_softmax_has_the_dtype_of_eager(dtypes, codegen):
    def function(grad, output):
        return torch.ops.aten._softmax_backward_data(grad, output, 1, dtypes[1])

    given = torch.randn(2, 3, 4).to(dtypes[0])
    torch.testing.assert_close(compiled(function, codegen)(*given), function(*given))


NUMBERS = [complex(math.nan, 1), complex(1, math.nan), complex(math.inf, -math.inf), complex(-0.0, -0.0), 1 + 2j]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_complex_constants_reach_the_program_as_they_are(number):
    def function(x):
        return x.real + torch.full((2,), number), torch.complex(x.real, x.imag) * number

    x = torch.tensor([1 + 1j, -0.0 - 2j])
    for run in (compiled(function, "eager"), torch.compile(function, backend=triptych.make_backend(lambda gm, _: gm))):
        for want, got in zip(function(x), run(x)):
            assert torch.equal(torch.view_as_real(want).view(torch.int32), torch.view_as_real(got).view(torch.int32))


LAYOUTS = {
    "transposed matrix": torch.randn(6, 4).t(),
    "transposed": torch.randn(2, 3, 4, 5).transpose(2, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_batch_norm_keeps_the_memory_format_not_the_strides(name, training, codegen):
    x = LAYOUTS[name].clone().requires_grad_()
    assert x.stride() == LAYOUTS[name].stride()
    statistics = torch.zeros(x.shape[1]), torch.ones(x.shape[1])

    def function(x):
        return F.batch_norm(x, *(None, None) if training else statistics, training=training)

    results = function(x), compiled(function, codegen)(x)
    gradients = [torch.autograd.grad(result.square().sum(), x)[0] for result in results]
    for want, got in (results, gradients):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize("beta", [0, 2])
def test_addr_has_the_layout_of_its_bias(beta, codegen):
    bias, x, y = torch.randn(5, 3).t(), torch.randn(3), torch.randn(5)
    function = lambda *operands: torch.addr(*operands, beta=beta, alpha=3)  # noqa: E731
    want, got = function(bias, x, y), compiled(function, codegen)(bias, x, y)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride() == bias.stride()


def test_torchs_own_table_stays_as_it_is():
    aten = torch.ops.aten
    before = dict(_private.select_decomp_table())
    table = corrected(before)
    changed = {op for op in before if table[op] is not before[op]}
    assert {op for op in changed if "batch_norm" not in op._schema.name} == {
        aten.addmm.default, aten.addmv.default, aten.add.Tensor, aten.addr.default, aten.clamp.default,
        aten._foreach_lerp.ScalarList, aten.index_select.default, aten.index_add.default,
        aten.max_unpool2d.default, aten.round.decimals,
        aten.soft_margin_loss_backward.default, aten.native_dropout.default, aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor, aten.cat.default, aten.lerp.Scalar, aten.lerp.Tensor,
        aten._softmax_backward_data.default, aten.binary_cross_entropy.default, aten.fmax.default, aten.fmin.default,
        aten.bernoulli.default,
        aten.special_xlog1py.default, aten.xlogy.Tensor, aten.put.default, aten.roll.default,
    }  # fmt: skip
    assert _private.select_decomp_table() == before
    assert aten.add.Tensor not in portable_decompositions()


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_draws_by_probabilities_keep_the_stream_of_eager(dtype, codegen):
    probabilities = torch.rand(5, 7).to(dtype)

    def draws(p):
        return torch.bernoulli(p), p.bernoulli() * 2, torch.rand(3)

    compiled = torch.compile(draws, backend=triptych.compile_fx, options={"codegen": codegen, "fallback_random": True})
    torch.manual_seed(3)
    wanted = draws(probabilities)
    torch.manual_seed(3)
    for got, want in zip(compiled(probabilities), wanted, strict=True):
        assert torch.equal(got, want)
