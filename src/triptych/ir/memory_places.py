"""The place of a value in the memory of its base, recomputed from the operations, since recorded facts may be old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .facts import fact, is_contiguous, known, known_equal, same_strides, tensor_fact
from .program import Program


@dataclass(frozen=True)
class Place:
    """The place of a value in memory: its base, and its sizes, strides and offset in the base."""

    base: Node
    tensor: torch.Tensor
    start: Any
    """The offset from the base's first element."""

    def same(self, other: Place) -> bool:
        return (
            self.base is other.base
            and self.tensor.dtype == other.tensor.dtype
            and known_equal(self.start, other.start)
            and known_equal(self.tensor.shape, other.tensor.shape)
            and same_strides(self.tensor, other.tensor)
        )

    def same_elements(self, other: Place) -> bool:
        """The same memory in the same order, perhaps in another shape."""
        return self.same(other) or (
            self.base is other.base
            and self.tensor.dtype == other.tensor.dtype
            and known_equal(self.start, other.start)
            and same_order(self.tensor, other.tensor)
        )


def place(program: Program, node: Node) -> Place | None:
    """The place of a value in the memory of its base; None where that cannot be determined."""
    views = []
    base = node
    while isinstance(base.target, _private.OpOverload):
        seen = program.aliasing.effects(base)
        if seen.writes or seen.may_copy or seen.random or len(seen.aliases) != 1:
            break
        views.append(base)
        (base,) = seen.aliases
    start = tensor = tensor_fact(base)
    if start is None or tensor is None or not _private.is_ordinary(start):
        return None
    for view in reversed(views):
        operand, known_as = view.all_input_nodes[0], tensor
        try:
            tensor = program.compute(view, lambda n: known_as if n is operand else fact(n))  # noqa: B023
        except Exception:
            return None
        recorded = tensor_fact(view)
        if not isinstance(tensor, torch.Tensor) or recorded is None or not same_strides(recorded, tensor):
            return None
    return Place(base, tensor, tensor.storage_offset() - start.storage_offset())


def same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are both contiguous with the same number of elements, so that they differ in shape alone?"""
    return known_equal(a.numel(), b.numel()) and is_contiguous(a) and is_contiguous(b)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """May two elements overlap in memory? False only where the strides prove that none do."""
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if not known(size == 1)]
    extent: Any = 1
    for stride, size in sorted(dims, key=lambda dim: _hint(dim[0])):
        if not known(stride >= extent):
            return True
        extent = extent + (size - 1) * stride
    return False


def _hint(number: Any) -> int:
    if isinstance(number, int):
        return number
    return int(number.node.hint) if number.node.has_hint() else 1 << 62


def lies_at(program: Program, node: Node, written: Place) -> bool:
    """Is the value exactly this place?"""
    there = place(program, node)
    return there is not None and there.same(written)
