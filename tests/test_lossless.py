"""`lossless` against the conversions themselves: every value of every small dtype, and the edges of the wide ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from triptych.ir.dtypes import _PARTS, _values, lossless

REAL = sorted(_values(), key=str)
SMALL = [d for d in REAL if d.itemsize <= 2]
WIDE = [d for d in REAL if d.itemsize > 2]


def every_value(dtype):
    if dtype == torch.bool:
        return torch.tensor([False, True])
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)


def edges(dtype):
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        mantissa = 1 + info.eps
        return torch.tensor(
            [0.0, -0.0, 1.0, -1.5, mantissa, info.max, info.min, info.smallest_normal, info.smallest_normal * info.eps,
             float("inf"), float("-inf"), float("nan")],
            dtype=dtype,
        )  # fmt: skip
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, 0, 1, info.max - 1, info.max], dtype=dtype)


def numbers(tensor):
    """Every element as an exact Python number with its sign; NaN as one."""
    if tensor.dtype.is_floating_point:
        tensor = tensor.double()
        return [("nan" if v != v else v, str(v)[0] == "-") for v in tensor.tolist()]
    return [(int(v), v < 0) for v in tensor.tolist()]


def converts_exactly(values, target):
    return numbers(values) == numbers(values.to(target))


@pytest.mark.parametrize("source", SMALL, ids=str)
def test_every_value_of_small_dtypes(source):
    values = every_value(source)
    exact = values.double()  # holds all of a small dtype
    for target in REAL:
        found = values.to(target).double()
        same = (found == exact) & (found.signbit() == exact.signbit()) | (found.isnan() & exact.isnan())
        assert lossless(source, target) == bool(same.all()), f"{source} -> {target}"


@pytest.mark.parametrize("source", WIDE, ids=str)
def test_edges_of_wide_dtypes(source):
    values = edges(source)
    for target in REAL:
        if lossless(source, target):
            assert converts_exactly(values, target), f"{source} -> {target}"


LOSSY = [
    (torch.int64, torch.float64), (torch.uint64, torch.int64), (torch.uint64, torch.float64),
    (torch.float32, torch.int64), (torch.int32, torch.float32), (torch.float64, torch.float32),
    (torch.float32, torch.bfloat16), (torch.float32, torch.bool), (torch.int32, torch.uint32),
    (torch.complex64, torch.float64), (torch.complex128, torch.complex64),
    (torch.int64, torch.complex128), (torch.float64, torch.complex64), (torch.bfloat16, torch.complex32),
]  # fmt: skip
EXACT = [
    (torch.int32, torch.float64), (torch.uint32, torch.float64), (torch.uint32, torch.int64),
    (torch.float32, torch.float64),
    (torch.float16, torch.complex64), (torch.complex64, torch.complex128), (torch.bool, torch.complex32),
    (torch.int8, torch.complex32), (torch.qint8, torch.qint8),
]  # fmt: skip


@pytest.mark.parametrize("source, target", LOSSY, ids=str)
def test_lossy(source, target):
    assert not lossless(source, target)


@pytest.mark.parametrize("source, target", EXACT, ids=str)
def test_exact(source, target):
    assert lossless(source, target)


def test_is_an_order():
    """Lossless twice is lossless, and every pair of known dtypes has an answer."""
    known = [*REAL, *_PARTS]
    for a, b, c in itertools.product(known, repeat=3):
        if lossless(a, b) and lossless(b, c):
            assert lossless(a, c), f"{a} -> {b} -> {c}"


def test_unknown_dtypes_hold_only_their_own():
    assert not lossless(torch.qint8, torch.int8)
    assert not lossless(torch.int8, torch.quint8)
