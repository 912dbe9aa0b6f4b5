"""Which dtypes can represent all values of which others, and what a number becomes in a dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .. import _private


@_private.plain_torch()
def rounded(number: float, dtype: torch.dtype) -> float:
    """The number as a tensor of that dtype holds it; inside a compile, too."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


@dataclass(frozen=True)
class _Integers:
    low: int
    high: int


@dataclass(frozen=True)
class _Floats:
    """Numbers of the form +-m * 2**e, m below 2**significand."""

    significand: int
    """Number of bits, including the hidden one."""
    lowest: int
    """Exponent of the smallest positive number."""
    highest: int
    """Exponent of the largest power of two."""
    infinite: bool = True
    zero: bool = True
    negative: bool = True
    negative_zero: bool = True


_FLOATS: dict[str, _Floats] = {
    "float64": _Floats(53, -1074, 1023),
    "float32": _Floats(24, -149, 127),
    "bfloat16": _Floats(8, -133, 127),
    "float16": _Floats(11, -24, 15),
    "float8_e5m2": _Floats(3, -16, 15),
    "float8_e4m3fn": _Floats(4, -9, 8, infinite=False),
    "float8_e5m2fnuz": _Floats(3, -17, 15, infinite=False, negative_zero=False),
    "float8_e4m3fnuz": _Floats(4, -10, 7, infinite=False, negative_zero=False),
    "float8_e8m0fnu": _Floats(1, -127, 127, infinite=False, zero=False, negative=False, negative_zero=False),
}
"""Keyed by name, because not every release of torch has all of these dtypes."""

_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


@functools.cache
def _values() -> dict[torch.dtype, _Integers | _Floats]:
    known: dict[torch.dtype, _Integers | _Floats] = {torch.bool: _Integers(0, 1)}
    for name in _INTEGERS:
        dtype = getattr(torch, name)
        known[dtype] = _Integers(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    for name, floats in _FLOATS.items():
        if hasattr(torch, name):
            known[getattr(torch, name)] = floats
    return known


_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@functools.cache
def lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Can `target` represent every value of `source`: infinities, NaN and the sign of zero too?

    Dtypes whose values we do not know (quantized ones, bits, several numbers in a byte) represent only their own.
    """
    if source == target:
        return True
    if target in _PARTS:
        return lossless(_PARTS.get(source, source), _PARTS[target])
    have, want = _values().get(source), _values().get(target)
    if have is None or want is None:
        return False
    if isinstance(have, _Integers):
        if isinstance(want, _Integers):
            return want.low <= have.low and have.high <= want.high
        return _holds_integers(want, have)
    return isinstance(want, _Floats) and _holds_floats(want, have)


def _holds_integers(floats: _Floats, integers: _Integers) -> bool:
    if not floats.zero or (integers.low < 0 and not floats.negative):
        return False
    # -128 has one significant bit, 127 has seven
    bits = max((integers.high).bit_length(), (-integers.low - 1).bit_length() if integers.low else 0)
    largest = bits if integers.low else bits - 1  # the exponent of -2**bits, or of the highest bit
    return bits <= floats.significand and largest <= floats.highest


def _holds_floats(wide: _Floats, narrow: _Floats) -> bool:
    return (
        narrow.significand <= wide.significand
        and wide.lowest <= narrow.lowest
        and narrow.highest <= wide.highest
        and all(
            getattr(wide, has) or not getattr(narrow, has)
            for has in ("infinite", "zero", "negative", "negative_zero")
        )
    )
