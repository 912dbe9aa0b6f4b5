"""Which dims of a reshape belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .facts import known_equal
from .sizes import size_hint

Groups = list[tuple[list[int], list[int]]]
"""Dims before and after a reshape that hold the same elements, in the smallest groups, outer before inner."""


def reshape_groups(old: Sequence[Any], new: Sequence[Any]) -> Groups | None:
    """All dims of a reshape in groups; None where that cannot be proved."""
    groups = leading_groups(old, new)
    is_all = [sum(map(len, dims)) for dims in zip(*groups)] == [len(old), len(new)]
    return groups if is_all else None


def leading_groups(old: Sequence[Any], new: Sequence[Any]) -> Groups:
    """The groups of a reshape up to the first dims of which nothing can be proved. Dims of size one are grouped with a
    neighbour."""
    groups: Groups = []
    i = j = 0
    while i < len(old) and j < len(new):
        first, left, right = (i, j), old[i], new[j]
        i, j = i + 1, j + 1
        while not known_equal(left, right):
            # which side grows is a guess; that the two come out equal is proved
            if i < len(old) and (j == len(new) or size_hint(left) < size_hint(right)):
                left, i = left * old[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                return groups
        groups.append((list(range(first[0], i)), list(range(first[1], j))))
    if all(known_equal(size, 1) for size in (*old[i:], *new[j:])):
        before, after = groups.pop() if groups else ([], [])
        groups.append((before + list(range(i, len(old))), after + list(range(j, len(new)))))
    return groups
