"""Our operators on the CPU: their definition, gradients, what is known without running them; and, where Triton is
there, the kernels in its interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import triptych  # noqa: F401  (registers the operators)
from triptych.kernels.lce import EPILOGUES
from triptych.verify.tolerances import REWRITE, difference, largest

ops = torch.ops.triptych


def random(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.double, requires_grad=grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_lce(epilogue, transposed):
    x, w, b = random(2, 3, 4), random(5, 3), random(5)
    y = ops.lce(x, w, b, epilogue, transposed)
    want = EPILOGUES[epilogue](F.linear(x.transpose(1, 2), w, b).transpose(1, 2))
    torch.testing.assert_close(y, want)
    assert y.is_contiguous() != transposed and y.transpose(1, 2).is_contiguous() == transposed
    gradcheck(lambda x, w, b: ops.lce(x, w, b, epilogue, transposed), (x, w, b))
    gradgradcheck(lambda x, w: ops.lce(x, w, None, epilogue), (x, w))


def test_dot_compress():
    x = random(2, 6, 4)
    for w in (random(6, 3), random(2, 6, 3)):
        torch.testing.assert_close(ops.dot_compress(x, w), x @ x.mT @ w)
        gradcheck(ops.dot_compress, (x, w))
        gradgradcheck(ops.dot_compress, (x, w))


@pytest.mark.parametrize("transposed", [False, True])
def test_b2b_gemm(transposed):
    a, b, c, bias = random(3, 2), random(2, 5), random(5, 4), random(5)
    f = "mul v0 v0; tanh v0; add v1 v2"

    def program(a, b, c, bias=None):
        return ops.b2b_gemm(a, b, c, bias, f, transposed)

    middle = a @ b + bias
    torch.testing.assert_close(program(a, b, c, bias), (middle * middle + middle.tanh()) @ c)
    assert program(a, b, c).t().is_contiguous() == transposed
    for inputs in ((a, b, c), (a, b, c, bias), (a.detach(), b, c)):
        gradcheck(program, inputs)
        gradgradcheck(program, inputs)


def test_gradients_where_operands_depend_on_each_other():
    """The same tensor several times, and a tensor that is computed from another operand."""
    x, scale = random(3, 3), random(3)
    square = lambda x: ops.b2b_gemm(x, x, x.tanh(), None, "tanh v0", False)  # noqa: E731
    gradcheck(square, x)
    gradgradcheck(square, x)
    whole, doubles = torch.randint(-9, 9, (3, 3), dtype=torch.int8), ["float64"] * 4
    gradcheck(lambda s: ops.int_mm_mul(whole, whole, [s, s, s.sin()], doubles), scale)


@pytest.mark.parametrize("f", ["sinh v0", "mul v0", "mul v0 v1", "mul v0 x"])
def test_b2b_gemm_says_what_is_no_function(f):
    with pytest.raises(ValueError):
        ops.b2b_gemm(random(3, 2), random(2, 5), random(5, 4), None, f, False)


def test_parallel_linear():
    x, q, k, v, b = random(2, 3, 4), random(5, 4), random(4, 2), random(1, 4), random(2)

    def program(x, q, k, v, b):
        return tuple(ops.parallel_linear(x, [q, k.t(), v], [b], [1]))

    for got, want in zip(program(x, q, k, v, b), (F.linear(x, q), F.linear(x, k.t(), b), F.linear(x, v)), strict=True):
        assert torch.equal(got, want)
    gradcheck(program, (x, q, k, v, b))
    first, *_ = program(x, q, k, v, b)
    first.sum().backward()  # the others are not used
    assert x.grad is not None and q.grad is not None


def test_group_linear():
    xs, ws, bs = [random(2, 3, 4), random(5, 2)], [random(3, 4), random(1, 2)], [random(3), random(1)]

    def program(*values):
        return tuple(ops.group_linear(values[:2], values[2:4], values[4:]))

    for biases in ((), bs):
        given = biases or [None, None]
        for got, x, w, b in zip(program(*xs, *ws, *biases), xs, ws, given, strict=True):
            assert torch.equal(got, F.linear(x, w, b))
        gradcheck(program, (*xs, *ws, *biases))


@pytest.mark.parametrize("dtype", [torch.double, torch.float32, torch.bfloat16])
def test_sum_parts(dtype):
    parts, others = random(3, 6), random(5, 2)
    made = ops.sum_parts([parts, parts[:0, :0], others, others], [1, 0, 5, 2, 1, 1], dtype, None)
    assert torch.equal(torch.cat(made), torch.cat([m.sum(0) for m in (parts, others, others)]).to(dtype))
    assert len({y.untyped_storage().data_ptr() for y in made if y.numel()}) == 5
    rounded = ops.sum_parts([parts], [6], dtype, torch.bfloat16)[0]
    assert torch.equal(rounded, parts.sum(0).bfloat16().to(dtype))
    gradcheck(lambda *parts: tuple(ops.sum_parts(parts, [1, 5, 0, 2], torch.double, None)), (parts, others))


@pytest.mark.parametrize("op, args", [
    (ops.lce.default, (random(2, 3, 4), random(5, 3), random(5), "gelu", True)),
    (ops.lce.default, (random(0, 3, 4), random(5, 3))),
    (ops.dot_compress.default, (random(2, 3, 4), random(3, 2))),
    (ops.dot_compress.default, (random(2, 3, 4), random(2, 3, 2))),
    (ops.parallel_linear.default, (random(2, 3, 4), [random(5, 4), random(2, 4)], [random(2)], [1])),
    (ops.parallel_linear.default, (random(2, 4), [random(5, 4), random(2, 4)], [], [])),
    (ops.parallel_linear.default, (random(4), [random(5, 4)], [random(5)], None)),
    (ops.group_linear.default, ([random(2, 4), random(3, 2)], [random(5, 4), random(1, 2)], [random(5), random(1)])),
    (ops.sum_parts.default, ([random(3, 6), random(1, 2)], [2, 4, 2], torch.float32, torch.bfloat16)),
    (ops.cat.default, ([random(2, 3), random(2, 1), random(2, 0)], 1)),
    (ops.group_linear.default, ([random(2, 3, 4), random(0, 2)], [random(5, 4), random(1, 2)], [])),
])  # fmt: skip
def test_registration(op, args):
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("call", [
    lambda: ops.lce(random(2, 3, 4), random(5, 4)),
    lambda: ops.lce(random(2, 3, 4), random(5, 3), random(4)),
    lambda: ops.lce(random(2, 3, 4), random(5, 3), None, "softmax"),
    lambda: ops.dot_compress(random(2, 3, 4), random(4, 2)),
    lambda: ops.parallel_linear(random(2, 4), [random(5, 3)], [], None),
    lambda: ops.parallel_linear(random(2, 4), [random(5, 4)], [random(5)], [1]),
    lambda: ops.sum_parts([random(2, 4)], [3], torch.float32, None),
    lambda: ops.sum_parts([random(2, 4)], [4, 1], torch.float32, None),
    lambda: ops.sum_parts([random(2, 4), random(2, 2)], [5, 1], torch.float32, None),
    lambda: ops.sum_parts([random(2, 4), random(2, 2).float()], [4, 2], torch.float32, None),
    lambda: ops.sum_parts([random(4)], [4], torch.float32, None),
    lambda: ops.sum_parts([random(2, 4), random(2, 4).to("meta")], [4, 4], torch.float32, None),
    lambda: ops.sum_parts([], [], torch.float32, None),
    lambda: ops.group_linear([random(2, 4)], [random(5, 3)], []),
    lambda: ops.group_linear([random(2, 4), random(2, 4)], [random(5, 4)], []),
])  # fmt: skip
def test_wrong_arguments(call):
    with pytest.raises(RuntimeError):
        call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_negative_numbers_of_columns(device):
    with pytest.raises(RuntimeError, match="are not numbers of columns"):
        ops.sum_parts([random(2, 4).to(device)], [-1, 5], torch.float32, None)


def test_the_package_does_without_triton():
    """Neither importing it nor running an operator on the CPU imports Triton."""
    program = (
        "import sys, torch, triptych\n"
        "torch.ops.triptych.lce(torch.ones(1, 2, 3), torch.ones(4, 2))\n"
        "assert not any(m == 'triptych.kernels.tuning' for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": "src"})


@pytest.mark.parametrize("allow", ["allow_tf32", "fp32_precision", "set_float32_matmul_precision"])
def test_float32_is_tf32_only_where_allowed(allow):
    """In a process of its own: the ways to allow it exclude each other."""
    program = (
        "import torch; from triptych.kernels.registry import dot_precision as p; matmul = torch.backends.cuda.matmul\n"
        "assert p(torch.float32) == 'ieee'\n"
        + {"allow_tf32": "matmul.allow_tf32 = True", "fp32_precision": "matmul.fp32_precision = 'tf32'",
           "set_float32_matmul_precision": "torch.set_float32_matmul_precision('high')"}[allow]
        + "\nassert p(torch.float32) == 'tf32'"
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": "src"})


# ---- the kernels, interpreted ----

def run_interpreted(module, function):
    """Call a function in a process of its own, because the interpreter is chosen when Triton is imported."""
    program = f"import sys; sys.path.insert(0, '.'); from {module} import {function}; {function}()"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"src:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this numpy is too new for this Triton's interpreter")
    assert done.returncode == 0, done.stderr[-3000:]


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@NEEDS_TRITON
def test_kernels_in_the_interpreter():
    run_interpreted("tests.test_kernels", "check_kernels")


SHAPES = [(2, 40, 24, 18), (1, 1, 1, 1), (3, 70, 65, 33), (2, 0, 3, 4), (0, 3, 3, 3), (2, 5, 0, 4), (2, 5, 7, 100)]
"""Batch, n, m, d: zero, one, and no multiple of any block."""


def check_kernels():
    """Called in a process of its own, because the interpreter is chosen when Triton is imported."""
    from triptych.kernels import (
        b2b_gemm,
        dot_compress,
        group_linear,
        lce,
        parallel_linear,
        sum_parts,
        triton_b2b_gemm,
        triton_dot_compress,
        triton_lce,
        triton_linears,
        triton_sums,
    )

    torch.manual_seed(0)
    # the interpreter multiplies bf16 by its bits: that dtype is for the GPU tests
    for dtype, (b, n, m, d) in itertools.product((torch.float32, torch.float16), SHAPES):
        for x in (torch.randn(b, n, d), torch.randn(b, d, n).transpose(1, 2), torch.randn(b, 2 * n, d)[:, ::2]):
            x = x.to(dtype)
            w, bias = torch.randn(n, m).to(dtype).t(), torch.randn(2 * m).to(dtype)[::2]
            for epilogue, transposed in itertools.product(EPILOGUES if x.is_contiguous() else ["relu"], (False, True)):
                got = triton_lce.launch(x, w, bias, epilogue, transposed)
                close(got, lce.anywhere(x.double(), w.double(), bias.double(), epilogue))
                assert got.stride() == lce.fake(x, w, bias, epilogue, transposed).stride()
            close(triton_lce.launch(x, w, None, "none", False), lce.anywhere(x.double(), w.double()))
            for k in (torch.randn(n, m), torch.randn(b, m, n).transpose(1, 2)):
                k = k.to(dtype)
                close(triton_dot_compress.launch(x, k), dot_compress.anywhere(x.double(), k.double()))
        for x in (torch.randn(b, 3, n).to(dtype), torch.randn(n).to(dtype), torch.randn(b, n, 3).to(dtype).mT):
            shapes = (torch.randn(m, n), torch.randn(n, m + 5).t(), torch.randn(0, n), torch.randn(2 * m, n)[::2])
            ws, bs = [w.to(dtype) for w in shapes], [torch.randn(m + 5).to(dtype), torch.randn(2 * m).to(dtype)[::2]]
            got = triton_linears.launch([x] * 4, ws, [None, bs[0], None, bs[1]])
            wide = [[t.double() for t in ts] for ts in (ws, bs)]
            for one, want in zip(got, parallel_linear.anywhere(x.double(), *wide, [1, 3]), strict=True):
                close(one, want)
                assert one.is_contiguous()
        xs = [torch.randn(b, 3, n), torch.randn(m + 1, 7), torch.randn(n, b).t(), torch.randn(0, 2)]
        ws = [torch.randn(m, n), torch.randn(7, n).t(), torch.randn(2 * m, n)[::2], torch.randn(3, 2)]
        xs, ws = [x.to(dtype) for x in xs], [w.to(dtype) for w in ws]
        for bs in ([], [torch.randn(w.shape[0]).to(dtype) for w in ws]):
            wide = [[t.double() for t in ts] for ts in (xs, ws, bs)]
            for one, want in zip(triton_linears.launch(xs, ws, bs or [None] * 4), group_linear.anywhere(*wide), strict=True):
                close(one, want)
    halves = [(torch.float16, None), (torch.float32, torch.float16), (torch.float32, torch.bfloat16)]
    for rows, columns in itertools.product((1, 32, 70), ([7], [0, 0], [64, 65, 0, 130], list(range(20)), [768, 0])):
        wide, other = torch.randn(rows, 5 + sum(columns)), torch.randn(33, 4).t()
        sums = [triton_sums.Sums(wide, 5 + sum(columns[:i]), size) for i, size in enumerate(columns)]
        sums += [triton_sums.Sums(other, 0, 30), triton_sums.Sums(other, 30, 3), triton_sums.Sums(other[1:], 0, 33)]
        given = [wide[:, 5:], other, other[1:]], [*columns, 30, 3, 33]
        for got, want in zip(triton_sums.launch(sums, torch.float32, None),
                             sum_parts.anywhere([m.double() for m in given[0]], given[1], torch.float64, None), strict=True):  # fmt: skip
            close(got, want)
        for dtype, through in halves:
            wanted = sum_parts.anywhere(*given, dtype, through)
            for got, want in zip(triton_sums.launch(sums, dtype, through), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)
    silu = "sigmoid v0; mul v0 v1; add v2 1.0"  # not 0 at 0
    sign = "gt v0 0.0; float v1; lt v0 0.0; float v3; sub v2 v4"
    for (m, k, n, p), transposed in itertools.product([(70, 16, 256, 32), (5, 3, 100, 7), (64, 64, 128, 16)], (False, True)):
        a, b, c, bias = torch.randn(m, k), torch.randn(n, k).t(), torch.randn(2 * n, p)[::2], torch.randn(n)
        for vector in (None, bias):
            y = b2b_gemm.fake(a, b, c, vector, silu, transposed)
            wide = [None if t is None else t.double() for t in (a, b, c, vector)]
            for f in (silu, sign):
                got = triton_b2b_gemm.launch(a, b, c, vector, b2b_gemm.function(f), y)
                close(got, b2b_gemm.anywhere(*wide, f, transposed), torch.full((1,), float(n)))


def check_tanh():
    from triptych.kernels import b2b_gemm, triton_b2b_gemm

    x = torch.cat([torch.logspace(-30, 2, 500), torch.tensor([0.0, 0.1, torch.inf, torch.nan])])
    x, one = torch.cat([x, -x])[:, None], torch.ones(1, 1)
    got = triton_b2b_gemm.launch(x, one, one, None, b2b_gemm.function("tanh v0"), torch.empty_like(x))
    torch.testing.assert_close(got, x.double().tanh().float(), rtol=2e-6, atol=0, equal_nan=True)


@NEEDS_TRITON
def test_tanh_of_small_numbers():
    run_interpreted("tests.test_kernels", "check_tanh")


@NEEDS_TRITON
def test_addresses_of_two_products_need_64_bits():
    """Every place in a matrix may lie beyond 2**31 elements."""
    from triptych.kernels.pointwise import Pointwise
    from triptych.kernels.triton_b2b_gemm import kernel_for

    constants = {"HAS_BIAS": True, "EVEN": False, "SHORT": True, "PRECISION": "tf32"}
    constants |= {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "BLOCK_P": 16}
    types = dict.fromkeys(("a", "b", "c", "bias", "y"), "*bf16")
    assert "mul.lo.s32" not in ptx_of(kernel_for(Pointwise.read("relu v0")).fn, types, constants, 90)


def ptx_of(kernel, types, constants, capability):
    """What a kernel is compiled to, without a GPU; arguments without a type are integers of 32 bits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]


def close(got, want, summed=None):
    """Against float64: the error of one rounding of the result and of sums in float32, which were as large as `summed`."""
    assert got.shape == want.shape
    scale = largest(want if summed is None else summed)
    problem = difference(want, got, REWRITE[got.dtype], scale=max(scale, 1e-6))
    assert not problem, problem
