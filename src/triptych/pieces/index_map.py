"""Index maps: which element of a source each element of a value is.

Operations that take pieces (split, unbind, slice, select) and operations that rearrange (reshape, permute, squeeze,
expand, flip) only select and order elements. Their result is described, for each of its axes, by a list of *factors*,
outer before inner: a factor `(dim, step, size)` walks `size` elements of the source's dim, `step` apart.
`x.reshape(2, 3).t()` of a vector x has the axes `[(0, 1, 3)]` and `[(0, 3, 2)]`. A factor without a dim repeats the
same element, as `expand` does.

Positions are counted per dim of the source, and not in its flattened elements. This keeps symbolic sizes out of the
arithmetic: only a dim that is itself split or sliced needs known numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ir.facts import known, known_equal


@dataclass(frozen=True, eq=False)
class Factor:
    """`size` steps along a dim of the source; without a dim, the same element repeated."""

    dim: int | None
    step: Any
    size: Any

    def same_walk(self, other: Factor) -> bool:
        return self.dim == other.dim and known_equal(self.step, other.step)


Axis = tuple[Factor, ...]


def product(sizes: Iterable[Any]) -> Any:
    return functools.reduce(operator.mul, sizes, 1)


def is_one(size: Any) -> bool:
    return known_equal(size, 1)


def quotient(number: Any, divisor: Any) -> Any:
    """The quotient of two numbers; None unless the division provably has no remainder."""
    if isinstance(number, int) and isinstance(divisor, int):
        return None if not divisor or number % divisor else number // divisor
    return number // divisor if known(divisor > 0) and known(number % divisor == 0) else None


def merged(factors: Iterable[Factor]) -> Axis:
    """Merges adjacent factors that walk a dim contiguously and drops factors of size one."""
    axis: list[Factor] = []
    for factor in factors:
        if is_one(factor.size):
            continue
        last = axis[-1] if axis else None
        if last is not None and last.dim == factor.dim and known_equal(last.step, factor.step * factor.size):
            axis[-1] = Factor(factor.dim, factor.step, last.size * factor.size)
        else:
            axis.append(factor)
    return tuple(axis)


def same_axis(left: Axis, right: Axis) -> bool:
    return len(left) == len(right) and all(
        a.same_walk(b) and known_equal(a.size, b.size) for a, b in zip(left, right)
    )


@dataclass(frozen=True, eq=False)
class IndexMap:
    """A value whose elements are elements of a source: its offset in each dim of the source, and factors
    for each axis."""

    source: Any
    sizes: tuple[Any, ...]
    """The sizes of the source."""
    offsets: tuple[Any, ...]
    axes: tuple[Axis, ...]

    @staticmethod
    def whole(source: Any, sizes: Sequence[Any]) -> IndexMap:
        """The identity: all of the source."""
        axes = tuple(() if is_one(n) else (Factor(d, 1, n),) for d, n in enumerate(sizes))
        return IndexMap(source, tuple(sizes), (0,) * len(sizes), axes)

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(product(f.size for f in axis) for axis in self.axes)

    @property
    def factors(self) -> list[Factor]:
        """All factors, outer before inner."""
        return [f for axis in self.axes for f in axis]

    def part_along(self, dim: int) -> tuple[Any, Any] | None:
        """The bounds of a slice along one dim, if the value is exactly that slice of the source."""
        whole = IndexMap.whole(self.source, self.sizes)
        if len(self.axes) != len(whole.axes):
            return None
        for d, (axis, identity) in enumerate(zip(self.axes, whole.axes)):
            if d != dim and not (same_axis(axis, identity) and known_equal(self.offsets[d], 0)):
                return None
        steps = [f for f in self.axes[dim] if f.dim != dim or not is_one(f.step)]
        return None if steps else (self.offsets[dim], self.offsets[dim] + self.shape[dim])

    def with_axis(self, axis: int, factors: Iterable[Factor]) -> IndexMap:
        return replace(self, axes=(*self.axes[:axis], merged(factors), *self.axes[axis + 1 :]))

    def moved(self, factor: Factor, count: Any) -> IndexMap:
        """The map with its offset advanced by some steps of a factor."""
        if factor.dim is None:
            return self
        at = factor.dim
        offset = self.offsets[at] + factor.step * count
        return replace(self, offsets=(*self.offsets[:at], offset, *self.offsets[at + 1 :]))

    # ---- operations; None where the result is not provably an index map ----

    def permute(self, dims: Sequence[int]) -> IndexMap:
        return replace(self, axes=tuple(self.axes[d] for d in dims))

    def unsqueeze(self, dim: int) -> IndexMap:
        return replace(self, axes=(*self.axes[:dim], (), *self.axes[dim:]))

    def squeeze(self, dims: Iterable[int]) -> IndexMap:
        """Squeezes those of the axes that have one element."""
        squeezed = {d for d in dims if not self.axes[d]}
        return replace(self, axes=tuple(a for d, a in enumerate(self.axes) if d not in squeezed))

    def slice(self, axis: int, start: Any, size: Any, step: Any = 1) -> IndexMap | None:
        """`size` elements from `start` on, `step` apart."""
        factors = self.axes[axis]
        if known_equal(start, 0) and is_one(step) and known_equal(size, self.shape[axis]):
            return self
        if is_one(size):
            return self._single(axis, start)
        if not factors or known_equal(size, 0):
            return None
        outer, inner = factors[0], factors[1:]
        if not inner:
            return self.moved(outer, start).with_axis(axis, [Factor(outer.dim, outer.step * step, size)])
        width = product(f.size for f in inner)
        first, count = quotient(start, width), quotient(size, width)
        if first is not None and count is not None and is_one(step):
            return self.moved(outer, first).with_axis(axis, [Factor(outer.dim, outer.step, count), *inner])
        if not all(isinstance(n, int) for n in (start, size, step, width)):
            return None
        if start // width == (start + (size - 1) * step) // width:  # all within one step of the outer factor
            within = self.moved(outer, start // width).with_axis(axis, inner)
            return within.slice(axis, start % width, size, step)
        return None

    def _single(self, axis: int, index: Any) -> IndexMap | None:
        result, factors = self, self.axes[axis]
        for number, factor in enumerate(reversed(factors)):
            if number == len(factors) - 1:
                result = result.moved(factor, index)
            elif isinstance(index, int) and isinstance(factor.size, int):
                index, digit = divmod(index, factor.size)
                result = result.moved(factor, digit)
            else:
                return None
        return result.with_axis(axis, ())

    def select(self, axis: int, index: Any) -> IndexMap | None:
        single = self._single(axis, index)
        return None if single is None else replace(single, axes=(*single.axes[:axis], *single.axes[axis + 1 :]))

    def flip(self, dims: Iterable[int]) -> IndexMap:
        result = self
        for dim in dims:
            for factor in self.axes[dim]:
                result = result.moved(factor, factor.size - 1)
            result = result.with_axis(dim, [Factor(f.dim, -f.step, f.size) for f in self.axes[dim]])
        return result

    def expand(self, shape: Sequence[Any]) -> IndexMap | None:
        axes: list[Axis] = [()] * (len(shape) - len(self.axes)) + list(self.axes)
        for d, want in enumerate(shape):
            if not axes[d]:
                axes[d] = merged([Factor(None, 0, want)])
            elif not known_equal(product(f.size for f in axes[d]), want):
                return None
        return replace(self, axes=tuple(axes))

    def reshape(self, shape: Sequence[Any]) -> IndexMap | None:
        """Distributes the factors over new axes; a factor that crosses the end of an axis is split there."""
        if known_equal(self.shape, tuple(shape)):
            return self
        if any(known_equal(n, 0) for n in shape):
            return None
        remaining = list(reversed(merged(self.factors)))
        axes = [_dealt(remaining, want) for want in shape]
        return None if remaining or None in axes else replace(self, axes=tuple(merged(a or ()) for a in axes))


def _dealt(remaining: list[Factor], want: Any) -> list[Factor] | None:
    """Takes factors from the end of the list until they make up an axis of that size."""
    axis: list[Factor] = []
    while not is_one(want):
        if not remaining:
            return None
        factor = remaining.pop()
        if known_equal(factor.size, want):
            axis.append(factor)
            return axis
        if (rest := quotient(want, factor.size)) is not None:
            axis.append(factor)
            want = rest
        elif (inner := quotient(factor.size, want)) is not None:
            axis.append(Factor(factor.dim, factor.step * inner, want))
            remaining.append(Factor(factor.dim, factor.step, inner))
            return axis
        else:
            return None
    return axis
