"""Rows of one source in any order, as one `index_select`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.facts import known_equal
from .blocks import Block, progressions_joined
from .index_map import IndexMap
from .plan import Step, plan

GATHER = "index_select"


def gathered(blocks: Sequence[Block], axis: int) -> list[Step] | None:
    """The steps, an `index_select` first, that compute the concatenation of all blocks from their source."""
    first = blocks[0].map
    if any(b.map.source is not first.source for b in blocks):
        return None
    dims = range(len(first.sizes))
    varied = [d for d in dims if not all(known_equal(b.map.offsets[d], first.offsets[d]) for b in blocks)]
    if len(varied) != 1:
        return None
    (dim,) = varied
    rows = [b.map.offsets[dim] for b in blocks]
    are_rows = all(f.dim != dim for b in blocks for f in b.map.factors)
    if not are_rows or not all(isinstance(row, int) for row in rows):
        return None
    selected = [replace(b, map=_row(b.map, dim, number, len(rows))) for number, b in enumerate(blocks)]
    joined = progressions_joined(selected, axis)
    steps = plan(joined[0].map) if len(joined) == 1 else None
    return None if steps is None else [(GATHER, {"dim": dim, "index": rows}), *steps]


def _row(chosen: IndexMap, dim: int, number: int, count: int) -> IndexMap:
    """The map of a block with the selected rows as its source: `count` rows, of which the block is row `number`."""
    offsets = (*chosen.offsets[:dim], number, *chosen.offsets[dim + 1 :])
    return replace(chosen, sizes=(*chosen.sizes[:dim], count, *chosen.sizes[dim + 1 :]), offsets=offsets)
