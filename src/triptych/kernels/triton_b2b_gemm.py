"""The kernel of triptych::b2b_gemm, one for each pointwise function. This module imports Triton, so it is imported only
where it is needed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .pointwise import Pointwise
from .registry import dot_precision
from .tuning import bucket, configs, kernel_of, run_tuned


@triton.jit
def erf(x, SHORT: tl.constexpr):
    """erf(x); where the result is rounded to 16 bits, a polynomial with an error of at most 3e-5. It is evaluated for
    every element, and the exact function takes several times as long as the products. The polynomial is fitted to
    erf(x) / x over x * x from 0 to 9."""
    if not SHORT:
        return tl.erf(x)
    x = tl.clamp(x, -3.0, 3.0)
    u = x * x
    value = 4.074185611102621e-08 * u - 1.944813220688957e-06
    value = value * u + 4.106037158635445e-05
    value = value * u - 0.0005110356141813099
    value = value * u + 0.004235421307384968
    value = value * u - 0.025102844461798668
    value = value * u + 0.11107931286096573
    value = value * u - 0.375314861536026
    value = value * u + 1.1282684803009033
    return value * x


@triton.jit
def tanh(x):
    """tanh(x); near 0, where the difference loses all digits, the first terms of the series."""
    u = x * x
    near_0 = x * (1 + u * (0.13333333333333333 * u - 0.3333333333333333))
    return tl.where(tl.abs(x) < 0.1, near_0, 2 * tl.sigmoid(2 * x) - 1)


SOURCE = '''
def b2b_gemm_kernel(
    a, b, c, bias, y, m, k, n, p,
    a_m, a_k, b_k, b_n, c_n, c_p, bias_n, y_m, y_p,
    m_bucket, n_bucket,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Computes BLOCK_M rows of the result, from BLOCK_N columns of the middle matrix at a time. EVEN: the sizes of
    B and C are multiples of the blocks, so both are read without masks."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    columns = tl.arange(0, BLOCK_P).to(tl.int64)
    middle = tl.arange(0, BLOCK_N).to(tl.int64)
    left = tl.load(a + rows[:, None] * a_m + inner[None, :] * a_k,
                   mask=(rows < m)[:, None] & (inner < k)[None, :], other=0.0)
    b_tile = b + inner[:, None] * b_k + middle[None, :] * b_n
    c_tile = c + middle[:, None] * c_n + columns[None, :] * c_p
    step = tl.full((1, 1), BLOCK_N, tl.int64)
    sums = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    for start in range(0, n, BLOCK_N):
        in_n = middle < n - start
        if EVEN:
            right = tl.load(b_tile)
        else:
            right = tl.load(b_tile, mask=(inner < k)[:, None] & in_n[None, :], other=0.0)
        v0 = tl.dot(left, right, input_precision=PRECISION)
        if HAS_BIAS:
            v0 += tl.load(bias + (start + middle) * bias_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
BODY
        if EVEN:
            after = tl.load(c_tile)
        else:
            result = tl.where(in_n[None, :], result, 0.0)  # f(0) may be anything
            after = tl.load(c_tile, mask=in_n[:, None] & (columns < p)[None, :], other=0.0)
        sums = tl.dot(result.to(c.dtype.element_ty), after, sums, input_precision=PRECISION)
        b_tile += step * b_n
        c_tile += step * c_n
    tl.store(y + rows[:, None] * y_m + columns[None, :] * y_p, sums.to(y.dtype.element_ty),
             mask=(rows < m)[:, None] & (columns < p)[None, :])
'''

CONFIGS = [
    ({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3),
    ({"BLOCK_M": 128, "BLOCK_N": 64}, 4, 3),
    ({"BLOCK_M": 128, "BLOCK_N": 64}, 8, 3),
    ({"BLOCK_M": 64, "BLOCK_N": 128}, 4, 3),
    ({"BLOCK_M": 64, "BLOCK_N": 32}, 4, 2),
    ({"BLOCK_M": 32, "BLOCK_N": 32}, 4, 2),
]
LARGEST_N = max(blocks["BLOCK_N"] for blocks, _, _ in CONFIGS)


@functools.cache
def kernel_for(f: Pointwise) -> Any:
    """The kernel with f written into it."""
    kernel = kernel_of(SOURCE.replace("BODY", f.in_triton(8 * " ")), "b2b_gemm_kernel", erf=erf, tanh=tanh)
    return triton.autotune(configs=configs(CONFIGS), key=["m_bucket", "n_bucket", "BLOCK_K", "BLOCK_P"])(kernel)


def launch(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None, f: Pointwise, y: torch.Tensor
) -> torch.Tensor:
    (m, k), (n, p) = a.shape, c.shape
    if y.numel() == 0:
        return y
    block_k, block_p = max(16, bucket(k)), max(16, bucket(p))
    given = a if bias is None else bias

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]),)

    kernel = kernel_for(f)
    key = (bucket(m), bucket(n), block_k, block_p, a.dtype, a.device)
    run_tuned(
        kernel, key, grid,
        a, b, c, given, y, m, k, n, p,
        *a.stride(), *b.stride(), *c.stride(), given.stride(0), *y.stride(),
        bucket(m), bucket(n),
        HAS_BIAS=bias is not None, EVEN=n % LARGEST_N == 0 and (k, p) == (block_k, block_p),
        SHORT=a.dtype.itemsize == 2, PRECISION=dot_precision(a.dtype), BLOCK_K=block_k, BLOCK_P=block_p,
    )  # fmt: skip
    return y
