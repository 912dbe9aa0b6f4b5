"""Sizes of chunks, which may be symbols: what can be proved about them, and where one chunk ends and the next begins.

Nothing here adds a guard. How many chunks there are is decided by the size that a symbol had when the program was
captured, its hint; the chunks are correct for every other size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..cost import size_hint
from ..ir.facts import is_static, known_equal, tensor_of
from ..rewrite.refusal import Refused

Size = int | torch.SymInt

MULTIPLE = 2
"""Where the number of units is symbolic, every chunk but the first has a multiple of this many. So none has one unit:
for a dim of size 1 Inductor would compile another graph."""


def shape_of(node: Node) -> tuple[Size, ...]:
    """The sizes of a value: numbers, or symbols whose values are known before the program runs."""
    shape = tuple(tensor_of(node).shape)
    if not is_static(shape) and free_unbacked_symbols(shape):
        raise Refused("the sizes {found} of {at} depend on data", at=node, found=list(shape))
    return shape


def quotient(size: Size, divisor: Size) -> Size | None:
    """size / divisor, if that is provably a whole number."""
    if known_equal(size, divisor):
        return 1
    result = size // divisor
    return result if known_equal(result * divisor, size) else None


@dataclass(frozen=True)
class Boundary:
    """Where a chunk begins or ends: after so many units, less some others."""

    units: Size
    less: Size = 0

    def entries(self, per: Size) -> Size:
        """The entries before the boundary, of which each unit has `per`. Not `(units - less) * per`: torch multiplies
        nothing out, and would not see that the sizes of the chunks add up."""
        return self.units * per - self.less * per


@dataclass(frozen=True)
class Span:
    """The units of one chunk."""

    start: Boundary
    stop: Boundary

    def entries(self, per: Size) -> Size:
        return self.stop.entries(per) - self.start.entries(per)


def most_chunks(units: Size) -> int:
    """The largest number of chunks into which so many units can be split."""
    return units if isinstance(units, int) else size_hint(units) // MULTIPLE


def spans(units: Size, chunks: int) -> list[Span]:
    """Chunks of equal size.

    If the number of units is known, the last chunk may be smaller, and there may be fewer chunks than asked for. If it
    is a symbol, the first chunk has the remainder too, so that its memory is large enough for each of the others. Where
    the symbol has a small value, the first chunk has all units, and the others have none.
    """
    if isinstance(units, int):
        size = math.ceil(units / chunks)
        between = [Boundary(start) for start in range(size, units, size)]
    else:
        rest = units // (MULTIPLE * chunks) * MULTIPLE
        between = [Boundary(units, left * rest) for left in range(chunks - 1, 0, -1)]
    return [Span(*ends) for ends in itertools.pairwise([Boundary(0), *between, Boundary(units)])]
