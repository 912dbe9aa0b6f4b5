"""How much a product with unaligned sizes must be padded, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..cost import UNKNOWN, Moved, Operand, Product, Work
from ..cost.device import tf32_is_allowed
from ..ir.facts import known
from ..ir.program import Program, Value
from ..ir.traits import is_pointwise
from ..rewrite.rule import Match

ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
"""Elements in 16 bytes."""

UNALIGNED_RATE = 0.5
"""Assumed rate of tensor cores on operands that are loaded element by element, relative to aligned operands."""


@dataclass(frozen=True)
class Padding:
    """How much each of the three sizes of a product grows."""

    m: int = 0
    k: int = 0
    n: int = 0


def needed_padding(m: Match, a: torch.Tensor, b: torch.Tensor) -> Padding:
    alignment = ALIGNMENT[a.dtype]
    sizes = {"m": a.shape[-2], "k": a.shape[-1], "n": b.shape[-1]}
    inner = {"k" if rows_lie_whole(a) else "m", "n" if rows_lie_whole(b) else "k", "n"}
    grows: dict[str, int] = {}
    for name in inner:
        size = sizes[name]
        if known(size % alignment == 0):
            continue
        m.require(isinstance(size, int), "the size {found} is not known to be aligned", found=size)
        grows[name] = -size % alignment
    return Padding(**grows)


def rows_lie_whole(matrix: torch.Tensor) -> bool:
    """Is the last dim the innermost one in memory? If the strides do not decide between the last two dims, it is, as in
    a contiguous tensor."""
    return known(matrix.stride(-1) == 1) or not known(matrix.stride(-2) == 1)


@dataclass(frozen=True)
class Site:
    """A product, the padding that it needs, and which of the copies for it cost nothing."""

    device: torch.device
    left: Operand
    right: Operand
    padding: Padding
    free: tuple[bool, bool, bool]
    """Whether padding the left operand, padding the right one and cutting the result cost nothing."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.left.shape[-2], self.left.shape[-1], self.right.shape[-1]

    def as_written(self) -> Work:
        slow = 1.0 if self.left.dtype == torch.float32 and not tf32_is_allowed() else UNALIGNED_RATE
        # the model does not know which kernels exist
        return Work.of(self.device, Product(self.left, self.right, rate=slow, error=UNKNOWN))

    def padded(self) -> Work:
        grow, ((m, k, n), batch) = self.padding, (self.sizes, math.prod(self.left.shape[:-2]))
        left, right = _padded(self.left, grow.m, grow.k), _padded(self.right, grow.k, grow.n)
        grown = (grow.m or grow.k, grow.k or grow.n, grow.m or grow.n)
        elements = ((m + grow.m) * (k + grow.k), (k + grow.k) * (n + grow.n), (m + grow.m) * (n + grow.n))
        copied = [count for count, grows, free in zip(elements, grown, self.free) if grows and not free]
        copies = [Moved(2 * batch * count * self.left.dtype.itemsize) for count in copied]
        return Work.of(self.device, Product(left, right, error=UNKNOWN), copies)


def product_site(m: Match, a: Value, b: Value, padding: Padding) -> Site:
    assert a.device is not None
    free = (_written_padded(m, a.node), _written_padded(m, b.node), _read_through(m.program, m.root.node))
    return Site(a.device, Operand.of(a.tensor), Operand.of(b.tensor), padding, free)


def _written_padded(m: Match, node: Node) -> bool:
    if m.program.computed_once(node):
        return True
    call = m.program.call(node)
    if call is not None and call.op == "permute" and len(node.users) == 1:
        return _written_padded(m, call.args["self"])
    return call is not None and is_pointwise(call.op) and call.op != "to" and len(node.users) == 1


def _read_through(program: Program, node: Node) -> bool:
    calls = [program.call(user) for user in node.users]
    return all(call is not None and is_pointwise(call.op) for call in calls)


def _padded(matrix: Operand, rows: int, columns: int) -> Operand:
    """The padded copy of a matrix, or the matrix itself where it does not grow."""
    if not rows and not columns:
        return matrix
    *batch, height, width = matrix.shape
    shape = (*batch, height + rows, width + columns)
    if matrix.strides[-1] == 1 or matrix.strides[-2] != 1:
        return Operand.contiguous(shape, matrix.dtype)
    return Operand.contiguous((*batch, shape[-1], shape[-2]), matrix.dtype).mT
