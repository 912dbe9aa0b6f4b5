"""Blocks of a concatenation: neighbouring operands that are one index map of one source are merged into one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.facts import known_equal
from .index_map import Axis, Factor, IndexMap, same_axis
from .read import Way


@dataclass(frozen=True, eq=False)
class Block:
    """Neighbouring operands of a concatenation that together are one index map of their source."""

    map: IndexMap
    ways: tuple[Way, ...]

    @property
    def count(self) -> int:
        return len(self.ways)


MOST_ROUNDS = 8
"""Search budget: how often runs of blocks are merged into longer runs."""

Pair = Callable[[IndexMap, IndexMap, int], "IndexMap | None"]


def side_by_side(left: IndexMap, right: IndexMap, axis: int) -> IndexMap | None:
    """One map for two maps, if the second continues where the first ends."""
    distance = _distance(left, right, axis)
    if distance is None:
        return None
    for outer, inner, count, more in _outer_factors(left.axes[axis], right.axes[axis]):
        expected = {} if outer.dim is None else {outer.dim: outer.step * count}
        if _same_places(distance, expected):
            return left.with_axis(axis, [Factor(outer.dim, outer.step, count + more), *inner])
    return None


def repeated(left: IndexMap, right: IndexMap, axis: int) -> IndexMap | None:
    """One map, with one more factor, for two maps that differ only in their offset."""
    distance = _distance(left, right, axis)
    if distance is None or len(distance) > 1 or not same_axis(left.axes[axis], right.axes[axis]):
        return None
    dim, step = next(iter(distance.items()), (None, 0))
    return left.with_axis(axis, [Factor(dim, step, 2), *left.axes[axis]])


def _distance(left: IndexMap, right: IndexMap, axis: int) -> dict[int, Any] | None:
    """The offset of the second map from the first, by dim; None if they differ in more than this axis."""
    if left.source is not right.source or len(left.axes) != len(right.axes):
        return None
    if not all(d == axis or same_axis(a, b) for d, (a, b) in enumerate(zip(left.axes, right.axes))):
        return None
    return {d: b - a for d, (a, b) in enumerate(zip(left.offsets, right.offsets)) if not known_equal(a, b)}


def _same_places(places: dict[int, Any], wanted: dict[int, Any]) -> bool:
    return places.keys() == wanted.keys() and all(known_equal(places[d], wanted[d]) for d in wanted)


def _outer_factors(left: Axis, right: Axis) -> list[tuple[Factor, Axis, Any, Any]]:
    """Ways to read both axes as some steps of the same outer factor over the same inner factors."""
    readings: list[tuple[Factor, Axis, Any, Any]] = []
    if left and right and left[0].same_walk(right[0]) and same_axis(left[1:], right[1:]):
        readings.append((left[0], left[1:], left[0].size, right[0].size))
    if left and same_axis(left[1:], right):
        readings.append((left[0], right, left[0].size, 1))
    if right and same_axis(left, right[1:]):
        readings.append((right[0], left, 1, right[0].size))
    return readings


def neighbours_joined(blocks: Sequence[Block], axis: int) -> list[Block]:
    """Merge blocks that are adjacent in their source, in this order."""
    return _joined(blocks, axis, (side_by_side, _next_row))


def progressions_joined(blocks: Sequence[Block], axis: int) -> list[Block]:
    """Merge equal blocks at equal distances as well, and runs of such runs."""
    current = list(blocks)
    for _ in range(MOST_ROUNDS):
        merged = _joined(current, axis, (side_by_side, repeated))
        if len(merged) == len(current):
            break
        current = merged
    return current


def _next_row(left: IndexMap, right: IndexMap, axis: int) -> IndexMap | None:
    """One map for two single rows, if the second is the next row."""
    distance = _distance(left, right, axis)
    if distance is None or left.axes[axis] or right.axes[axis]:
        return None
    return repeated(left, right, axis) if known_equal(list(distance.values()), [1]) else None


def _joined(blocks: Sequence[Block], axis: int, pairs: Sequence[Pair]) -> list[Block]:
    maps: list[IndexMap] = []
    ways: list[list[Way]] = []
    for block in blocks:
        last = maps[-1] if maps else None
        union = None if last is None else next((p for f in pairs if (p := f(last, block.map, axis))), None)
        if union is None:
            maps.append(block.map)
            ways.append(list(block.ways))
        else:
            maps[-1] = union
            ways[-1] += block.ways
    return [Block(m, tuple(w)) for m, w in zip(maps, ways)]
