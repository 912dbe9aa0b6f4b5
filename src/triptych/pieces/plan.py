"""The shortest list of view operations that computes an index map from its source."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ir.facts import fact, known, known_equal
from ..rewrite.emit import Emitter
from .index_map import Factor, IndexMap, is_one, product

Step = tuple[str, dict[str, Any]]


def plan(target: IndexMap) -> list[Step] | None:
    """Slices, at most one reshape, a permute, an expand and a reshape; None where these do not suffice."""
    upward = [_upward(f) for f in target.factors]
    if None in upward:
        return None
    offsets = list(target.offsets)
    for factor, up in zip(target.factors, upward):
        if factor is not up and factor.dim is not None:  # it counts down
            offsets[factor.dim] = offsets[factor.dim] + factor.step * (factor.size - 1)
    factors = [f for f in upward if f is not None]
    places: list[_Place] = []
    cuts: list[Step] = []
    empty = sum(not axis for axis in target.axes) - sum(is_one(n) for n in target.sizes)
    for dim in range(len(target.sizes)):
        dim_factors = [f for f in factors if f.dim == dim]
        cut = _cut(dim, target.sizes[dim], offsets[dim], dim_factors, keep=empty > 0)
        if cut is None:
            return None
        if not dim_factors and not is_one(target.sizes[dim]):
            empty -= 1
        cuts = [*cut.steps, *cuts]  # from the last dim to the first: a select then renumbers no dim still to be cut
        places += cut.places
    flipped = [w for w, f in zip(factors, target.factors) if w is not f and w.dim is not None]
    return cuts + _arranged(target, factors, places, flipped)


def _upward(factor: Factor) -> Factor | None:
    """The factor counting up; None if the sign of its step is not known."""
    if factor.dim is None or known(factor.step > 0):
        return factor
    return Factor(factor.dim, -factor.step, factor.size) if known(factor.step < 0) else None


@dataclass(eq=False)
class _Place:
    """A dim of the source after slicing, or one digit of such a dim in a mixed radix. It has one factor, or is a single
    element."""

    dim: int
    factor: Factor | None
    full: Any
    """Its size before it is sliced."""
    start: Any = 0

    @property
    def size(self) -> Any:
        return 1 if self.factor is None else self.factor.size

    @property
    def is_cut(self) -> bool:
        return not known_equal(self.full, self.size)


@dataclass(eq=False)
class _Cut:
    steps: list[Step] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)


def _cut(dim: int, size: Any, offset: Any, factors: list[Factor], keep: bool) -> _Cut | None:
    """How to read the factors of one dim of the source: as the whole dim, with a slice, with a select, or as digits of
    a mixed radix."""
    if not factors:
        if is_one(size):
            return _Cut([], [_Place(dim, None, 1)])
        if keep:
            return _Cut([_slice(dim, offset, offset + 1, size)], [_Place(dim, None, 1)])
        return _Cut([("select", {"dim": dim, "index": offset})])
    if len(factors) == 1:
        (factor,) = factors
        end = offset + (factor.size - 1) * factor.step + 1
        place = _Place(dim, factor, factor.size)
        if known_equal(offset, 0) and is_one(factor.step) and known_equal(factor.size, size):
            return _Cut([], [place])
        return _Cut([_slice(dim, offset, end, size, factor.step)], [place])
    return _digits(dim, size, offset, factors)


def _slice(dim: int, start: Any, end: Any, size: Any, step: Any = 1) -> Step:
    bounds = {"start": start, "end": None if known_equal(end, size) else end, "step": step}
    return "slice", {"dim": dim, **bounds}


def _digits(dim: int, size: Any, offset: Any, factors: list[Factor]) -> _Cut | None:
    """A dim that several factors walk: it is viewed as rows of rows, and each level is sliced."""
    if not all(isinstance(n, int) for f in factors for n in (f.step, f.size)) or not isinstance(offset, int):
        return _even_digits(dim, size, offset, factors)
    ordered = sorted(factors, key=lambda f: -f.step)
    if ordered[-1].step != 1:
        ordered.append(Factor(dim, 1, 1))
    widths = [f.step for f in ordered]
    if any(a % b for a, b in zip(widths, widths[1:])):
        return None
    reach = ordered[0].size * widths[0]
    if not known(reach <= size):
        return None
    for start in dict.fromkeys((offset, size - reach if isinstance(size, int) else 0, offset - offset % widths[0], 0)):
        if not 0 <= start <= offset or not known(start + reach <= size):
            continue
        digits = _places(dim, ordered, offset - start)
        if digits is not None:
            whole = known_equal(start, 0) and known_equal(reach, size)
            return _Cut([] if whole else [_slice(dim, start, start + reach, size)], digits)
    return None


def _places(dim: int, ordered: list[Factor], offset: int) -> list[_Place] | None:
    """Each factor as a digit that begins at its part of the offset; None if a digit would overflow."""
    places: list[_Place] = []
    full = ordered[0].size
    for factor, after in zip(ordered, [*ordered[1:], None]):
        digit, offset = divmod(offset, factor.step)
        if digit + factor.size > full:
            return None
        places.append(_Place(dim, None if factor.size == 1 else factor, full, digit))
        full = factor.step // after.step if after is not None else 1
    return places


def _even_digits(dim: int, size: Any, offset: Any, factors: list[Factor]) -> _Cut | None:
    """The same for symbolic sizes: only if the factors cover the dim without gaps."""
    step: Any = 1
    ordered: list[Factor] = []
    remaining = list(factors)
    while remaining:
        factor = next((f for f in remaining if known_equal(f.step, step)), None)
        if factor is None:
            return None
        remaining.remove(factor)
        ordered.insert(0, factor)
        step = step * factor.size
    if not known_equal(offset, 0) or not known_equal(step, size):
        return None
    return _Cut([], [_Place(dim, f, f.size) for f in ordered])


def _arranged(target: IndexMap, factors: list[Factor], places: list[_Place], flipped: list[Factor]) -> list[Step]:
    """The steps from the sliced dims of the source to the axes of the target."""
    steps: list[Step] = []
    shape = target.shape
    order = [f for f in factors if f.dim is not None]
    place_factors = [p.factor for p in places if p.factor is not None]
    in_order = len(order) == len(factors) and all(a is b for a, b in zip(order, place_factors, strict=True))
    current = _sizes_by_dim(places)
    if in_order and not flipped and not any(p.is_cut for p in places):
        return _seen_as(current, shape)
    full = [p.full for p in places]
    steps += _seen_as(current, full)
    steps += [_slice(d, p.start, p.start + p.size, p.full) for d, p in enumerate(places) if p.is_cut]
    permutation = _order(target, factors, places)
    if permutation != list(range(len(places))):
        steps.append(("permute", {"dims": permutation}))
    places = [places[d] for d in permutation]
    if flipped:
        steps.append(("flip", {"dims": [d for d, p in enumerate(places) if any(p.factor is f for f in flipped)]}))
    current = [p.size for p in places]
    if len(order) < len(factors):
        wide = [f.size for f in factors]
        steps += _seen_as(current, [1 if f.dim is None else f.size for f in factors])
        steps.append(("expand", {"size": wide}))
        current = wide
    return steps + _seen_as(current, shape)


def _sizes_by_dim(places: Sequence[_Place]) -> list[Any]:
    """The shape after the first slices, before dims are viewed as several digits."""
    return [product(p.full for p in digits) for _, digits in itertools.groupby(places, lambda p: p.dim)]


def _order(target: IndexMap, factors: list[Factor], places: list[_Place]) -> list[int]:
    """The permutation of the places: factors in the order of the target, single elements where the target has an axis
    without factors."""
    singles = [d for d, p in enumerate(places) if p.factor is None]
    at = {id(p.factor): d for d, p in enumerate(places) if p.factor is not None}
    order: list[int] = []
    remaining = iter(factors)
    for axis in target.axes:
        if not axis and singles:
            order.append(singles.pop(0))
        for factor in (next(remaining) for _ in axis):
            if factor.dim is not None:
                order.append(at[id(factor)])
    return order + singles


def _seen_as(current: Sequence[Any], shape: Sequence[Any]) -> list[Step]:
    """The single step, if one is needed, from one shape to another with the same number of elements."""
    if known_equal(tuple(current), tuple(shape)):
        return []
    if len(shape) == len(current) + 1:
        for d, size in enumerate(shape):
            if is_one(size) and known_equal((*shape[:d], *shape[d + 1 :]), tuple(current)):
                return [("unsqueeze", {"dim": d})]
    ones = [d for d, size in enumerate(current) if is_one(size)]
    if len(shape) < len(current) and known_equal([n for n in current if not is_one(n)], tuple(shape)):
        return [("squeeze", {"dim": ones})]
    symbols = [d for d, size in enumerate(shape) if not isinstance(size, int)]
    sizes = list(shape)
    if len(symbols) == 1 and not any(known_equal(n, 0) for n in shape):
        sizes[symbols[0]] = -1  # follows from the others: no node has to compute it
    return [("reshape", {"shape": sizes})]


def build(op: Emitter, source: Any, steps: Sequence[Step]) -> Any:
    value = source
    for name, args in steps:
        arguments = {k: v for k, v in args.items() if not (name == "slice" and v is None)}
        if name == "index_select":
            arguments["index"] = op.constant(torch.tensor(args["index"], device=fact(source).device))
        value = getattr(op, name)(value, **arguments)
    return value
