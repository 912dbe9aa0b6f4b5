"""The elements of a tensor as a function of their index: a few pieces, each a number or an affine integer pattern."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..facts import known_equal
from .affine import (
    ALWAYS,
    NEVER,
    Affine,
    Condition,
    Shape,
    TooLarge,
    both,
    condition,
    constant,
    either,
    opposite,
    pinned,
    stretched,
)
from .shape_only import same_bits

Leaf = Affine | torch.Tensor
"""An integer is an affine pattern (a constant has no steps); a boolean or float is a zero-dim tensor."""

PIECES = 8
MODEST = 2**31
"""Static numbers below this cannot overflow int64 in combination with the sizes of a real tensor."""


@dataclass(frozen=True, eq=False)
class Elements:
    """Pieces that cover every index exactly once: a condition on the index, and the element where it holds."""

    pieces: tuple[tuple[Condition, Leaf], ...]

    @property
    def only(self) -> Leaf | None:
        """The leaf of the only piece; None if there are several."""
        return self.pieces[0][1] if len(self.pieces) == 1 else None

    @property
    def is_uniform(self) -> bool:
        leaf = self.only
        return leaf is not None and (isinstance(leaf, torch.Tensor) or leaf.constant)

    def number(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The number that every element is equal to, as a zero-dim tensor."""
        leaf = self.only
        if leaf is None or isinstance(leaf, torch.Tensor):
            return leaf
        return scalar(leaf, dtype)

    def through(self, see: Callable[[Affine], Affine | None], shape: Shape) -> Elements | None:
        """The elements of a view of that shape. `see` maps a pattern; None where the result is not affine."""
        parts: list[tuple[Condition, Leaf]] = []
        for where, leaf in self.pieces:
            clauses = [[see(pattern) for pattern in clause] for clause in where.clauses]
            seen = see(leaf) if isinstance(leaf, Affine) else leaf
            if seen is None or any(p is None for clause in clauses for p in clause):
                return None
            parts.append((condition([tuple(c) for c in clauses], shape), seen))  # type: ignore[arg-type]
        return pieces(parts, shape)

    def broadcast(self, own: Shape, shape: Shape) -> Elements | None:
        """Broadcast to a shape; None where it is not known which dims are expanded."""
        if len(shape) == len(own) and known_equal(list(own), list(shape)):
            return self
        places = stretched(own, shape)
        return self.through(lambda pattern: pattern.through(places, len(shape)), shape)

    def truth(self, shape: Shape) -> Condition:
        """Where a boolean is true."""
        condition_true = NEVER
        for where, leaf in self.pieces:
            if isinstance(leaf, torch.Tensor) and bool(leaf):
                condition_true = either(condition_true, where, shape)
        return condition_true

    def bounds(self, shape: Shape) -> list[tuple[Any, Any]]:
        """The least and the greatest element of each piece, for integers."""
        leaves = [leaf for _, leaf in self.pieces]
        return [(leaf.least(shape), leaf.most(shape)) for leaf in leaves if isinstance(leaf, Affine)]


def uniform(leaf: Leaf) -> Elements:
    return Elements(((ALWAYS, leaf),))


def boolean(where: Condition, shape: Shape) -> Elements | None:
    """True where the condition holds."""
    return pieces([(where, torch.tensor(True)), (opposite(where, shape), torch.tensor(False))], shape)


def pieces(parts: Sequence[tuple[Condition, Leaf]], shape: Shape) -> Elements | None:
    """Drops pieces whose condition never holds and merges those with equal leaves."""
    merged: list[tuple[Condition, Leaf]] = []
    for where, leaf in parts:
        if where.never:
            continue
        leaf = _where_it_holds(leaf, where, shape)
        for i, (other, there) in enumerate(merged):
            if same_leaf(leaf, there):
                merged[i] = (either(where, other, shape), there)
                break
        else:
            merged.append((where, leaf))
    if len(merged) > PIECES:
        raise TooLarge
    if not merged:  # no element at all
        return None
    return Elements(tuple(merged)) if len(merged) > 1 else uniform(merged[0][1])


def _where_it_holds(leaf: Leaf, where: Condition, shape: Shape) -> Leaf:
    """Replaces the step along a dim by a constant where the condition allows only one index there."""
    if isinstance(leaf, torch.Tensor) or len(where.clauses) != 1:
        return leaf
    for dim, place in pinned(where.clauses[0], shape).items():
        steps = list(leaf.steps)
        leaf = Affine(leaf.start + steps[dim] * place, (*steps[:dim], 0, *steps[dim + 1 :]))
    return leaf


def same_leaf(left: Leaf, right: Leaf) -> bool:
    if isinstance(left, Affine) and isinstance(right, Affine):
        return left.same(right)
    return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and same_bits(left, right)


def combinations(operands: Sequence[Elements], shape: Shape) -> Iterator[tuple[Condition, tuple[Leaf, ...]]]:
    """The combinations of pieces of several values, with the condition under which each occurs."""
    for chosen in itertools.product(*(o.pieces for o in operands)):
        where = ALWAYS
        for condition_there, _ in chosen:
            where = both(where, condition_there, shape)
        if not where.never:
            yield where, tuple(leaf for _, leaf in chosen)


# ---- leaves ----


def scalar(leaf: Leaf, dtype: torch.dtype) -> torch.Tensor | None:
    """A constant leaf as a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.constant or type(leaf.start) is not int:
        return None
    return torch.full((), leaf.start, dtype=dtype)


def leaf_of(value: torch.Tensor, rank: int) -> Leaf:
    """The leaf of a number that torch computed."""
    value = value.reshape(())
    if value.dtype == torch.bool or value.dtype.is_floating_point:
        return value
    return constant(int(value.item()), rank)


def cast(leaf: Leaf, dtype: torch.dtype, shape: Shape) -> Leaf | None:
    """The leaf in another dtype, cast as torch does; an affine pattern only to an integer dtype that holds it."""
    if isinstance(leaf, Affine):
        if dtype == torch.bool or dtype.is_floating_point:
            number = scalar(leaf, torch.int64)
            return None if number is None else number.to(dtype)
        return leaf if fits(leaf, dtype, shape) else None
    if leaf.dtype.is_floating_point and not dtype.is_floating_point and not bool(leaf.isfinite()):
        return None  # casting NaN or infinity to an integer is undefined
    return leaf_of(leaf.to(dtype), len(shape))


def fits(leaf: Affine, dtype: torch.dtype, shape: Shape) -> bool:
    """Does the dtype represent every element of the pattern?"""
    least, most = leaf.least(shape), leaf.most(shape)
    limits = torch.iinfo(dtype)
    if type(least) is int and type(most) is int:
        return limits.min <= least and most <= limits.max
    numbers = [n for n in (leaf.start, *leaf.steps) if type(n) is int]
    return dtype == torch.int64 and all(abs(n) < MODEST for n in numbers)
