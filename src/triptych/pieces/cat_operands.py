"""Pieces of a cat or stack that come from a single operand, as pieces of that operand."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import replace
from typing import Any

from torch.fx import Node

from ..ir.facts import is_static, known
from ..ir.program import Program
from .index_map import Factor, IndexMap, product
from .read import readable

FEW = 64
"""Search budget: how many operands of symbolic size are compared one by one."""


def within_operand(program: Program, piece: IndexMap) -> IndexMap | None:
    """The same elements as an index map of one operand of the source, which is a cat or a stack."""
    call = program.call(piece.source)
    if call is None or call.op not in ("cat", "stack") or call.mutates:
        return None
    tensors, dim = call.args["tensors"], call.get("dim")
    if not isinstance(tensors, (list, tuple)) or not isinstance(dim, int):
        return None
    inner = _stacked(piece, tensors, dim) if call.op == "stack" else _joined(program, piece, tensors, dim)
    if inner is None or not isinstance(inner.source, Node):
        return None
    operand, whole = readable(inner.source), readable(piece.source)
    same_kind = operand is not None and whole is not None and operand.dtype == whole.dtype
    return inner if same_kind and operand is not None and operand.dim() == len(inner.sizes) else None


def _stacked(piece: IndexMap, tensors: Any, dim: int) -> IndexMap | None:
    row = piece.offsets[dim]
    if not isinstance(row, int) or not 0 <= row < len(tensors) or any(f.dim == dim for f in piece.factors):
        return None

    def without(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:dim], *values[dim + 1 :])

    def moved(factor: Factor) -> Factor:
        return replace(factor, dim=factor.dim - 1) if factor.dim is not None and factor.dim > dim else factor

    axes = tuple(tuple(moved(f) for f in axis) for axis in piece.axes)
    return IndexMap(tensors[row], without(piece.sizes), without(piece.offsets), axes)


def _joined(program: Program, piece: IndexMap, tensors: Any, dim: int) -> IndexMap | None:
    starts = _starts(program, piece.source, tensors, dim)
    if starts is None:
        return None
    walks = [f for f in piece.factors if f.dim == dim]
    first = piece.offsets[dim]
    last = first + sum(f.step * (f.size - 1) for f in walks)
    if not all(known(f.step > 0) for f in walks) or not known(product(piece.shape) > 0):
        return None
    number = _operand_at(starts, first)
    start, end = starts[number], starts[number + 1]
    if not known(start <= first) or not known(last < end):
        return None
    sizes = (*piece.sizes[:dim], end - start, *piece.sizes[dim + 1 :])
    offsets = (*piece.offsets[:dim], first - start, *piece.offsets[dim + 1 :])
    return IndexMap(tensors[number], sizes, offsets, piece.axes)


def _operand_at(starts: list[Any], place: Any) -> int:
    """The number of the operand that contains the index `place`; a guess where that is not known."""
    if is_static((place, starts[-1])):  # then all are
        return min(bisect.bisect_right(starts, place), len(starts) - 1) - 1
    first = itertools.takewhile(lambda number: known(starts[number + 1] <= place), range(min(len(starts) - 2, FEW)))
    return len(list(first))


def _starts(program: Program, cat: Node, tensors: Any, dim: int) -> list[Any] | None:
    """The index at which each operand of a cat begins. A legacy empty vector, which cat skips, has length 0."""
    if cat not in program.notes:
        facts = [readable(t) for t in tensors]
        lengths = [0 if t is not None and t.dim() <= dim else None if t is None else t.shape[dim] for t in facts]
        known_all = None not in lengths
        program.notes[cat] = list(itertools.accumulate(lengths, initial=0)) if known_all else None
    return program.notes[cat]
