"""Affine integer patterns of an index, start + step * index along each dim, and conditions made of them.

Sizes may be symbols. A positive answer is proved for every size (with `known`, which adds no guard).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..facts import known, known_equal

Shape = Sequence[Any]


@dataclass(frozen=True, eq=False)
class Affine:
    """start + the sum of steps[d] * (index along dim d); numbers may be symbolic."""

    start: Any
    steps: tuple[Any, ...]

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.start + other.start, tuple(a + b for a, b in zip(self.steps, other.steps)))

    def __sub__(self, other: Affine) -> Affine:
        return self + other.times(-1)

    def plus(self, number: Any) -> Affine:
        return Affine(self.start + number, self.steps)

    def times(self, number: Any) -> Affine:
        return Affine(self.start * number, tuple(s * number for s in self.steps))

    @property
    def constant(self) -> bool:
        """Is it constant?"""
        return all(is_zero(s) for s in self.steps)

    def same(self, other: Affine) -> bool:
        return known_equal(self.start, other.start) and known_equal(self.steps, other.steps)

    def through(self, places: Sequence[Affine | None], rank: int) -> Affine | None:
        """The pattern in terms of the index of a view of that rank; `places` gives the old index of each dim."""
        seen = Affine(self.start, (0,) * rank)
        for step, place in zip(self.steps, places):
            if is_zero(step):
                continue
            if place is None:
                return None
            seen += place.times(step)
        return seen

    def least(self, shape: Shape) -> Any:
        """The least value, or None if it is not known. Any answer is right for a tensor without elements."""
        return self._extreme(shape, lowest=True)

    def most(self, shape: Shape) -> Any:
        return self._extreme(shape, lowest=False)

    def _extreme(self, shape: Shape, lowest: bool) -> Any:
        total = self.start
        for step, size in zip(self.steps, shape):
            if is_zero(step):
                continue
            rises = known(step >= 0)
            if not rises and not known(step <= 0):
                return None
            if rises != lowest:  # the extreme is at the last index
                total = total + step * (size - 1)
        return total

    def never_negative(self, shape: Shape) -> bool:
        least = self.least(shape)
        return least is not None and known(least >= 0)

    def always_negative(self, shape: Shape) -> bool:
        most = self.most(shape)
        return most is not None and known(most < 0)


def is_zero(number: Any) -> bool:
    return number == 0 if type(number) is int else known_equal(number, 0)


def index(dim: int, rank: int) -> Affine:
    """The pattern whose value is the index along one dim."""
    return Affine(0, tuple(int(d == dim) for d in range(rank)))


def constant(number: Any, rank: int) -> Affine:
    return Affine(number, (0,) * rank)


def stretched(own: Shape, shape: Shape) -> list[Affine | None]:
    """The index of each dim in terms of the broadcast shape; None where that is not known, as it is in a shape of lower
    rank: the operand of a reduction."""
    lead, rank = len(shape) - len(own), len(shape)
    if lead < 0:
        return [None] * len(own)
    indices: list[Affine | None] = []
    for dim, size in enumerate(own):
        if known(size == 1):
            indices.append(constant(0, rank))
        else:
            indices.append(index(lead + dim, rank) if known_equal(size, shape[lead + dim]) else None)
    return indices


Clause = tuple[Affine, ...]
"""A conjunction: all of these patterns are >= 0."""

CLAUSES, CONSTRAINTS = 12, 8
"""Search budget: conditions with more clauses, or clauses with more patterns, are given up. Real masks have few."""


@dataclass(frozen=True, eq=False)
class Condition:
    """A disjunction: it holds where one of the clauses does."""

    clauses: tuple[Clause, ...]

    @property
    def always(self) -> bool:
        return any(not clause for clause in self.clauses)

    @property
    def never(self) -> bool:
        return not self.clauses


ALWAYS, NEVER = Condition(((),)), Condition(())


class TooLarge(Exception):
    """The condition has too many clauses."""


def condition(clauses: Sequence[Clause], shape: Shape) -> Condition:
    """Drops conjuncts that always hold and clauses that never do."""
    clauses_left: list[Clause] = []
    for clause in clauses:
        smaller = _smaller(clause, shape)
        if smaller == ():
            return ALWAYS
        if smaller is not None and not any(_clause_implies(smaller, k, shape) for k in clauses_left):
            clauses_left = [k for k in clauses_left if not _clause_implies(k, smaller, shape)]
            clauses_left.append(smaller)
    if len(clauses_left) > CLAUSES or any(len(c) > CONSTRAINTS for c in clauses_left):
        raise TooLarge
    return Condition(tuple(clauses_left))


def at_least_zero(pattern: Affine, shape: Shape) -> Condition:
    return condition([(pattern,)], shape)


def both(left: Condition, right: Condition, shape: Shape) -> Condition:
    if left.never or right.never:
        return NEVER
    if left.always or right.always:
        return right if left.always else left
    if len(left.clauses) * len(right.clauses) > CLAUSES**2:
        raise TooLarge
    return condition([(*a, *b) for a in left.clauses for b in right.clauses], shape)


def either(left: Condition, right: Condition, shape: Shape) -> Condition:
    if left.always or right.always:
        return ALWAYS
    if left.never or right.never:
        return right if left.never else left
    return condition([*left.clauses, *right.clauses], shape)


def opposite(of: Condition, shape: Shape) -> Condition:
    negated = ALWAYS
    for clause in of.clauses:
        others = condition([(pattern.times(-1).plus(-1),) for pattern in clause], shape)
        negated = both(negated, others, shape)
    return negated


def holds_everywhere(of: Condition, shape: Shape) -> bool:
    return of.always or opposite(of, shape).never


def holds_nowhere(of: Condition, shape: Shape) -> bool:
    return of.never or _no_element(shape)


def same_condition(left: Condition, right: Condition, shape: Shape) -> bool:
    """Are two conditions equivalent?"""
    return both(left, opposite(right, shape), shape).never and both(right, opposite(left, shape), shape).never


def _no_element(shape: Shape) -> bool:
    return any(is_zero(s) for s in shape)


def _smaller(clause: Clause, shape: Shape) -> Clause | None:
    """The clause without conjuncts that always hold; None if the clause never holds."""
    constraints: list[Affine] = []
    for pattern in map(_in_lowest_terms, clause):
        if pattern.always_negative(shape):
            return None
        if pattern.never_negative(shape) or any(_implies(k, pattern, shape) for k in constraints):
            continue
        if any((k + pattern).always_negative(shape) for k in constraints):
            return None
        constraints = [k for k in constraints if not _implies(pattern, k, shape)]
        constraints.append(pattern)
    return tuple(constraints)


def _in_lowest_terms(pattern: Affine) -> Affine:
    """2i - 2j + 1 >= 0 is i - j >= 0."""
    numbers = [s for s in pattern.steps if not is_zero(s)]
    if not numbers or not all(type(n) is int for n in (*numbers, pattern.start)):
        return pattern
    common = math.gcd(*numbers)
    return Affine(pattern.start // common, tuple(s // common if type(s) is int else 0 for s in pattern.steps))


def _implies(left: Affine, right: Affine, shape: Shape) -> bool:
    """Does `left >= 0` imply `right >= 0`, because right is nowhere smaller?"""
    return (right - left).never_negative(shape)


def _clause_implies(left: Clause, right: Clause, shape: Shape) -> bool:
    return all(any(_implies(a, b, shape) for a in left) for b in right)


def pinned(clause: Clause, shape: Shape) -> dict[int, Any]:
    """Dims whose index can only be the first or the last where the clause holds: `i < 1` says i = 0."""
    fixed: dict[int, Any] = {}
    for pattern in clause:
        dims = [d for d, s in enumerate(pattern.steps) if not is_zero(s)]
        if len(dims) != 1:
            continue
        (dim,) = dims
        step, start = pattern.steps[dim], pattern.start
        if known(step < 0) and known(start + step < 0):
            fixed[dim] = 0
        elif known(step > 0) and known(start + step * (shape[dim] - 2) < 0):
            fixed[dim] = shape[dim] - 1
    return fixed


def lower_triangle(shape: Shape) -> Condition:
    rank = len(shape)
    return at_least_zero(index(rank - 2, rank) - index(rank - 1, rank), shape)


def row_keeps_one(where: Condition, shape: Shape) -> bool:
    """Does a clause hold in each row for the first key, the last key, or the key on the diagonal?"""
    rank = len(shape)
    first = [index(d, rank) for d in range(rank)]
    candidates = [constant(0, rank), constant(shape[-1] - 1, rank)]
    if rank > 1 and known(shape[-2] <= shape[-1]):
        candidates += [index(rank - 2, rank), index(rank - 2, rank).plus(shape[-1] - shape[-2])]
    return any(
        all(seen is not None and seen.never_negative(shape) for seen in (p.through(places, rank) for p in clause))
        for clause in where.clauses
        for places in ([*first[:-1], key] for key in candidates)
    )
