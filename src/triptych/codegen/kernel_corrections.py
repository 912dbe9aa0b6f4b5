"""Decompositions of operators that Inductor's own kernels do not compute as eager does.

Each says what the kernel does wrong. For calls that the kernel computes correctly, torch's decomposition of the
operator is used, if there is one; otherwise the operator is left whole by returning `NotImplemented`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _private
from ..ir.dtypes import rounded
from .decompositions import Decomposition, Decompositions

Correction = Callable[[Decomposition], Decomposition]


def without_faulty_kernels(table: Decompositions) -> Decompositions:
    """A copy of `table` with these decompositions in front of those that it has."""
    aten = torch.ops.aten
    corrections: dict[Correction, tuple[Any, ...]] = {
        any_of_bytes: (aten.any.default, aten.any.dim, aten.any.dims),
        ldexp_of_other_dtypes: (aten.ldexp.Tensor,),
        remainder_of_floats: (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
        extremes_of_bytes: (
            *(aten.amin.default, aten.amax.default, aten.min.default, aten.max.default),
            *(aten.argmin.default, aten.argmax.default, aten.min.dim, aten.max.dim, aten.aminmax.default),
        ),
        padding_with_symbols: (aten.constant_pad_nd.default,),
        scatter_of_symbols: (aten.scatter.value,),
        scalar_of_default_dtype: (aten.scalar_tensor.default,),
        truncated_quotients_of_integers: (aten.div.Tensor_mode, aten.div.Scalar_mode),
        shortened_windows: (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default),
        totals_in_bytes: (aten.sum.default, aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int),
    }
    corrected = {
        op: functools.partial(correction(table.get(op, _left_whole)), op)
        for correction, operators in corrections.items()
        for op in operators
    }
    return {**table, **corrected}


def _left_whole(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


BYTES = (torch.uint8, torch.int8)


def any_of_bytes(otherwise: Decomposition) -> Decomposition:
    """For uint8, the result of `any` is uint8; that of the kernel is bool."""

    def any_(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x != 0, *args, **kwargs).to(x.dtype) if x.dtype == torch.uint8 else otherwise(x, *args, **kwargs)

    return any_


def ldexp_of_other_dtypes(otherwise: Decomposition) -> Decomposition:
    """The kernel's result has the dtype of the first operand, or float32, whatever the dtype of the exponent is."""

    def ldexp(op: Any, x: torch.Tensor, exponent: torch.Tensor) -> Any:
        if x.dtype.is_floating_point and not exponent.dtype.is_floating_point and exponent.dtype != torch.bool:
            return otherwise(x, exponent)
        two = 2.0 if x.dtype == torch.float32 or not x.dtype.is_floating_point else x.new_full((), 2.0)
        return x * torch.pow(two, exponent)

    return ldexp


def remainder_of_floats(otherwise: Decomposition) -> Decomposition:
    """The kernel for CPUs subtracts a rounded quotient times the divisor. That is NaN where the divisor is infinite,
    and has few right digits, or none, where the quotient is large."""

    def remainder(op: Any, x: Any, divisor: Any) -> Any:
        dtype = torch.result_type(x, divisor)
        device = next(v.device for v in (x, divisor) if isinstance(v, torch.Tensor))
        if not dtype.is_floating_point or device.type != "cpu":
            return otherwise(x, divisor)
        if not isinstance(x, torch.Tensor):
            x = torch.full((), _rounded(x, dtype), dtype=dtype, device=device)
        divisor = _rounded(divisor, dtype)
        rest = torch.fmod(x, divisor)
        is_beyond = (rest != 0) & ((rest < 0) != (divisor < 0))
        return torch.where(is_beyond, rest + divisor, rest)

    return remainder


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """A number rounded to the dtype, as in eager; a kernel would compute with more digits."""
    if not isinstance(value, (int, float)):
        return value
    return rounded(value, dtype)


def truncated_quotients_of_integers(otherwise: Decomposition) -> Decomposition:
    """The kernel for CPUs divides by 0, which ends the process; the one that rounds down checks first, and raises."""

    def div(op: Any, x: Any, divisor: Any, *, rounding_mode: str | None = None) -> Any:
        dtype = torch.result_type(x, divisor)
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        devices = {value.device.type for value in (x, divisor) if isinstance(value, torch.Tensor)}
        if rounding_mode != "trunc" or not is_integer or devices != {"cpu"}:
            return otherwise(x, divisor, rounding_mode=rounding_mode)
        x, divisor = (_in_range(value, dtype) for value in (x, divisor))
        down = torch.div(x, divisor, rounding_mode="floor")
        is_less = (x - down * divisor != 0) & ((x < 0) != (divisor < 0))
        return down + is_less.to(dtype)

    return div


def _in_range(value: Any, dtype: torch.dtype) -> Any:
    """The value as an integer of this dtype; values out of range wrap around."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (value - least) % (most - least + 1) + least


SYMBOLS = (torch.SymInt, torch.SymFloat)


def padding_with_symbols(otherwise: Decomposition) -> Decomposition:
    """The kernel takes no symbol for the number that it pads with."""

    def constant_pad_nd(op: Any, x: torch.Tensor, pad: Any, value: Any = 0) -> Any:
        if not isinstance(value, SYMBOLS):
            return otherwise(x, pad, value)
        is_inside = op(torch.ones_like(x, dtype=torch.bool), pad, False)
        return torch.where(is_inside, op(x, pad, 0), x.new_full((), value))  # type: ignore[arg-type]

    return constant_pad_nd


def scatter_of_symbols(otherwise: Decomposition) -> Decomposition:
    """As `padding_with_symbols`: the kernel takes a tensor."""

    def scatter(op: Any, x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, SYMBOLS):
            return otherwise(x, dim, index, value)
        return torch.scatter(x, dim, index, x.new_full(index.shape, value))  # type: ignore[arg-type]

    return scatter


def scalar_of_default_dtype(otherwise: Decomposition) -> Decomposition:
    """For an integer without a dtype, the result of the kernel is int64; that of the operator has the default dtype."""

    def scalar_tensor(op: Any, number: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is None:
            return op(number, dtype=torch.get_default_dtype(), **kwargs)
        return otherwise(number, dtype=dtype, **kwargs)

    return scalar_tensor


def extremes_of_bytes(otherwise: Decomposition) -> Decomposition:
    """The kernel for CPUs fills only a part of a vector of 8-bit numbers, but then compares all of it."""

    def extreme(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in BYTES or x.device.type != "cpu":
            return otherwise(x, *args, **kwargs)
        return _private.pytree.tree_map(  # indices are int64
            lambda value: value.to(x.dtype) if value.dtype == torch.int32 else value,
            op(x.to(torch.int32), *args, **kwargs),
        )

    return extreme


def shortened_windows(otherwise: Decomposition) -> Decomposition:
    """With `ceil_mode`, the last window may reach beyond the padded input, and the average is over the elements inside.
    If padding counts, the kernel of the gradient divides by the size of the whole window instead."""

    def backward(
        op: Any, grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, *modes: Any
    ) -> Any:
        ceil_mode, count_padding, divisor = modes
        if not ceil_mode or not count_padding or divisor is not None:
            return otherwise(grad, x, kernel, stride, padding, *modes)
        elements = grad.new_ones(())
        for dim in range(-3 if op is torch.ops.aten.avg_pool3d_backward.default else -2, 0):
            size, step, pad = (_of_dim(sizes, dim) for sizes in (kernel, stride or kernel, padding or [0]))
            start = torch.arange(grad.shape[dim], device=grad.device) * step
            length = (start + size).clamp(max=x.shape[dim] + 2 * pad) - start
            elements = elements * length.to(grad.dtype).view(-1, *[1] * (-1 - dim))
        return op(grad / elements, x, kernel, stride, padding, True, True, 1)

    return backward


def _of_dim(sizes: Any, dim: int) -> int:
    """One number stands for all dims."""
    return sizes[dim] if len(sizes) > 1 else sizes[0]


def totals_in_bytes(otherwise: Decomposition) -> Decomposition:
    """As `extremes_of_bytes`, for sums and products whose result has 8 bits."""

    def total(op: Any, x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype not in BYTES or x.device.type != "cpu":
            return otherwise(x, *args, dtype=dtype, **kwargs)
        wide = op(x.to(dtype), *args, dtype=torch.int64, **kwargs)
        least = torch.iinfo(dtype).min
        return (((wide - least) & 0xFF) + least).to(dtype)  # in range: kernels convert other values differently

    return total
