"""The pattern of a tensor whose elements are known: one number, a triangle of two numbers, or an integer range."""

from __future__ import annotations

import torch

from .affine import Affine, TooLarge, at_least_zero, index, opposite
from .elements import MODEST, Elements, leaf_of, pieces, uniform

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are compared by their bits: 0.0 is not -0.0, and a NaN is equal to itself."""

PROBE = 1024
"""How many elements are examined first; most tensors without the pattern are rejected by these alone."""


def pattern_of(value: torch.Tensor) -> Elements | None:
    """The elements of a CPU tensor as a function of their index; None where they follow no pattern that we look for."""
    if not value.numel() or value.element_size() not in BITS:
        return None
    bits = value.contiguous().view(BITS[value.element_size()])
    flat = bits.flatten()
    if bool((flat[:PROBE] == flat[0]).all()) and bool((flat == flat[0]).all()):
        return uniform(leaf_of(value.flatten()[0], value.dim()))
    return _range(value) or _triangle(value, bits)


def holds_two_numbers(value: torch.Tensor) -> bool:
    """Is every element one of two numbers, as in a mask? NaN is not a number."""
    flat = value.flatten()
    return flat.numel() > 0 and _are_two(flat[:PROBE]) and (flat.numel() <= PROBE or _are_two(flat))


def _are_two(flat: torch.Tensor) -> bool:
    others = flat[flat != flat[0]]
    return not others.numel() or bool((others == others[0]).all())


def _range(value: torch.Tensor) -> Elements | None:
    """Integers that grow by a fixed step along each dim."""
    if value.dtype == torch.bool or value.dtype.is_floating_point or value.dtype == torch.uint64:
        return None
    numbers = value.to(torch.int64)
    start = int(numbers.flatten()[0])
    steps = [int(numbers.select(d, 1).flatten()[0]) - start if n > 1 else 0 for d, n in enumerate(value.shape)]
    if max(map(abs, [start, *steps])) >= MODEST:
        return None
    expected = torch.full([], start)
    for dim, step in enumerate(steps):
        places = torch.arange(value.shape[dim]).view([-1 if d == dim else 1 for d in range(value.dim())])
        expected = expected + places * step
    return uniform(Affine(start, tuple(steps))) if bool((numbers == expected).all()) else None


def _triangle(value: torch.Tensor, bits: torch.Tensor) -> Elements | None:
    """One number on and below a diagonal of the last two dims, another one above it."""
    if value.dim() < 2:
        return None
    matrices = bits.flatten(0, -3) if value.dim() > 2 else bits[None]
    matrix = matrices[0]
    if not bool(((matrix[0] == matrix[-1, 0]) | (matrix[0] == matrix[0, -1])).all()):  # rejects most others
        return None
    lower = matrix == matrix[-1, 0]
    columns, rows = int(lower[0].sum()), int((~lower[:, 0]).sum())
    diagonal = columns - 1 if columns else -rows
    expected = torch.ones_like(lower).tril(diagonal)
    above = matrix == matrix[0, -1]
    if not bool((lower == expected).all() and (above == ~expected).all() and (matrices == matrix).all()):
        return None
    rank, shape = value.dim(), value.shape
    inside = at_least_zero((index(rank - 2, rank) - index(rank - 1, rank)).plus(diagonal), shape)
    corners = (value.reshape(-1, *shape[-2:])[0][corner] for corner in ((-1, 0), (0, -1)))
    low, high = (leaf_of(corner, rank) for corner in corners)
    try:
        return pieces([(inside, low), (opposite(inside, shape), high)], shape)
    except TooLarge:
        return None
