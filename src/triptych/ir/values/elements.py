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
"""Integers are patterns (a plain number is one without steps); booleans and floats are tensors of one element."""

PIECES = 8
MODEST = 2**31
"""Static numbers below this cannot overflow an int64 together with sizes of tensors that exist in memory."""


@dataclass(frozen=True, eq=False)
class Elements:
    """Pieces that cover every index once: where its condition holds, a piece says what the element is."""

    pieces: tuple[tuple[Condition, Leaf], ...]

    @property
    def only(self) -> Leaf | None:
        """What every element is, if one pattern says it."""
        return self.pieces[0][1] if len(self.pieces) == 1 else None

    @property
    def is_uniform(self) -> bool:
        leaf = self.only
        return leaf is not None and (isinstance(leaf, torch.Tensor) or leaf.constant)

    def number(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The one number that every element is, as a tensor without dims."""
        leaf = self.only
        if leaf is None or isinstance(leaf, torch.Tensor):
            return leaf
        return scalar(leaf, dtype)

    def through(self, see: Callable[[Affine], Affine | None], shape: Shape) -> Elements | None:
        """In a view of that shape, which shows a pattern as `see` says; None where it is none any more."""
        made: list[tuple[Condition, Leaf]] = []
        for where, leaf in self.pieces:
            clauses = [[see(pattern) for pattern in clause] for clause in where.clauses]
            seen = see(leaf) if isinstance(leaf, Affine) else leaf
            if seen is None or any(p is None for clause in clauses for p in clause):
                return None
            made.append((condition([tuple(c) for c in clauses], shape), seen))  # type: ignore[arg-type]
        return pieces(made, shape)

    def broadcast(self, own: Shape, shape: Shape) -> Elements | None:
        """Stretched to a shape as torch broadcasts; None where it is not known which dims are stretched."""
        if len(shape) == len(own) and known_equal(list(own), list(shape)):
            return self
        places = stretched(own, shape)
        return self.through(lambda pattern: pattern.through(places, len(shape)), shape)

    def truth(self, shape: Shape) -> Condition:
        """Where a boolean is true."""
        made = NEVER
        for where, leaf in self.pieces:
            if isinstance(leaf, torch.Tensor) and bool(leaf):
                made = either(made, where, shape)
        return made

    def bounds(self, shape: Shape) -> list[tuple[Any, Any]]:
        """The smallest and the largest of each piece; of integers."""
        leaves = [leaf for _, leaf in self.pieces]
        return [(leaf.least(shape), leaf.most(shape)) for leaf in leaves if isinstance(leaf, Affine)]


def uniform(leaf: Leaf) -> Elements:
    return Elements(((ALWAYS, leaf),))


def boolean(where: Condition, shape: Shape) -> Elements | None:
    """True where the condition holds."""
    return pieces([(where, torch.tensor(True)), (opposite(where, shape), torch.tensor(False))], shape)


def pieces(made: Sequence[tuple[Condition, Leaf]], shape: Shape) -> Elements | None:
    """Pieces that never hold are left out, those that say the same are one."""
    kept: list[tuple[Condition, Leaf]] = []
    for where, leaf in made:
        if where.never:
            continue
        leaf = _where_it_holds(leaf, where, shape)
        for i, (other, there) in enumerate(kept):
            if same_leaf(leaf, there):
                kept[i] = (either(where, other, shape), there)
                break
        else:
            kept.append((where, leaf))
    if len(kept) > PIECES:
        raise TooLarge
    if not kept:  # no element at all
        return None
    return Elements(tuple(kept)) if len(kept) > 1 else uniform(kept[0][1])


def _where_it_holds(leaf: Leaf, where: Condition, shape: Shape) -> Leaf:
    """Where only one index is left along a dim, its pattern needs no step there."""
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
    """Each way in which pieces of several values meet."""
    for chosen in itertools.product(*(o.pieces for o in operands)):
        where = ALWAYS
        for condition_there, _ in chosen:
            where = both(where, condition_there, shape)
        if not where.never:
            yield where, tuple(leaf for _, leaf in chosen)


# ---- leaves ----


def scalar(leaf: Leaf, dtype: torch.dtype) -> torch.Tensor | None:
    """A leaf that is one known number, as a tensor."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.constant or type(leaf.start) is not int:
        return None
    return torch.full((), leaf.start, dtype=dtype)


def leaf_of(value: torch.Tensor, rank: int) -> Leaf:
    """A number that torch computed."""
    value = value.reshape(())
    if value.dtype == torch.bool or value.dtype.is_floating_point:
        return value
    return constant(int(value.item()), rank)


def cast(leaf: Leaf, dtype: torch.dtype, shape: Shape) -> Leaf | None:
    """The leaf in another dtype, exactly as torch casts it; a pattern stays one only among integers that hold it."""
    if isinstance(leaf, Affine):
        if dtype == torch.bool or dtype.is_floating_point:
            number = scalar(leaf, torch.int64)
            return None if number is None else number.to(dtype)
        return leaf if fits(leaf, dtype, shape) else None
    if leaf.dtype.is_floating_point and not dtype.is_floating_point and not bool(leaf.isfinite()):
        return None  # NaN and infinity as integers: whatever the machine does
    return leaf_of(leaf.to(dtype), len(shape))


def fits(leaf: Affine, dtype: torch.dtype, shape: Shape) -> bool:
    """No element is beyond what the dtype holds."""
    least, most = leaf.least(shape), leaf.most(shape)
    limits = torch.iinfo(dtype)
    if type(least) is int and type(most) is int:
        return limits.min <= least and most <= limits.max
    numbers = [n for n in (leaf.start, *leaf.steps) if type(n) is int]
    return dtype == torch.int64 and all(abs(n) < MODEST for n in numbers)
