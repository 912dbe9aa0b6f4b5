"""Where the axes of the scores are: queries, keys, and everything else, through views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.facts import known, known_equal
from ..rewrite.refusal import Refused


@dataclass(frozen=True)
class Layout:
    """The axes of a tensor that holds one number for each query and key."""

    batch: tuple[int, ...]
    """Dims that are neither queries nor keys, in the order in which Q and K have them."""
    query: int
    key: int

    @property
    def rank(self) -> int:
        return len(self.batch) + 2

    @property
    def order(self) -> list[int]:
        return [*self.batch, self.query, self.key]


@dataclass(frozen=True)
class BatchStep:
    """What a view of the scores does to their batch axes; Q, K and V are to follow."""

    sizes: tuple[Any, ...] | None = None
    order: tuple[int, ...] | None = None


def permuted(layout: Layout, dims: Sequence[int]) -> tuple[Layout, BatchStep | None]:
    place = {old: new for new, old in enumerate(dims)}
    moved = Layout(tuple(place[d] for d in layout.batch), place[layout.query], place[layout.key])
    in_order = tuple(sorted(range(len(moved.batch)), key=lambda i: moved.batch[i]))
    if in_order == tuple(range(len(in_order))):
        return moved, None
    return Layout(tuple(sorted(moved.batch)), moved.query, moved.key), BatchStep(order=in_order)


def reshaped(layout: Layout, old: Sequence[Any], new: Sequence[Any]) -> tuple[Layout, BatchStep]:
    """The layout after a reshape that leaves the axes of queries and keys alone."""
    if list(layout.batch) != sorted(layout.batch):
        raise Refused("a reshape of axes in another order")
    query = key = None
    batch: list[int] = []
    for before, after in groups(old, new):
        if layout.query in before or layout.key in before:
            real = [d for d in before if not known(old[d] == 1) or d in (layout.query, layout.key)]
            wanted = [d for d in after if not known(new[d] == 1)]
            if len(real) != 1 or len(wanted) > 1:
                raise Refused("a reshape mixes the axes of queries or keys with others")
            chosen = wanted[0] if wanted else after[-1]
            batch += [d for d in after if d != chosen]
            if layout.query in before:
                query = chosen
            else:
                key = chosen
        else:
            batch += after
    if query is None or key is None:
        raise Refused("a reshape drops the axis of queries or keys")
    made = Layout(tuple(batch), query, key)
    return made, BatchStep(sizes=tuple(new[d] for d in batch))


def groups(old: Sequence[Any], new: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """Dims before and after a reshape that hold the same elements, in the smallest groups."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i >= len(old) or j >= len(new):  # what is left over has size one
            before, after = list(range(i, len(old))), list(range(j, len(new)))
            if any(not known(old[d] == 1) for d in before) or any(not known(new[d] == 1) for d in after):
                raise Refused("a reshape that cannot be followed")
            if found:
                found[-1] = (found[-1][0] + before, found[-1][1] + after)
                return found
            return [(before, after)]
        before, after = [i], [j]
        left, right = old[i], new[j]
        i, j = i + 1, j + 1
        while not known_equal(left, right):
            if _less(left, right) and i < len(old):
                left, before = left * old[i], [*before, i]
                i += 1
            elif j < len(new):
                right, after = right * new[j], [*after, j]
                j += 1
            else:
                raise Refused("a reshape that cannot be followed")
        found.append((before, after))
    return found


def _less(left: Any, right: Any) -> bool:
    """Which side of a group is to grow: sizes divide one another; where symbols stand, what is known decides."""
    if isinstance(left, int) and isinstance(right, int):
        return left < right
    return not known(left % right == 0) or known(left == 1)
