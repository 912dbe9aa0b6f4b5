"""What a product of int8 matrices and its scaling cost, in two kernels and in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..cost import UNKNOWN, DeviceModel, Moved, Operand, Part, Product, Work
from ..cost.timing import Run
from ..ir.facts import tensor_of
from ..kernels.capture import is_launched
from ..kernels.int_mm_mul import NAME_OF
from ..rewrite.rule import Match
from .neighbours import read_by_pointwise

RATE = 0.7
"""Assumed rate of our kernel, relative to the library's."""


@dataclass(frozen=True)
class Int8Product(Product):
    """A product of int8 matrices."""

    @property
    def written(self) -> torch.dtype:
        return torch.int32

    @property
    def elements(self) -> int:
        """Of the result."""
        _, m, n, _ = self.sizes
        return m * n

    @property
    def result_bytes(self) -> int:
        return self.elements * self.written.itemsize

    @property
    def more(self) -> int:
        """The bytes of the result, beyond those of an int8 matrix, which the model of a product counts."""
        return self.result_bytes - self.elements

    @property
    def bytes(self) -> float:
        return super().bytes + self.more

    def seconds(self, model: DeviceModel) -> float:
        return super().seconds(model) + self.more / model.bandwidth

    def prepare(self, device: torch.device) -> Run:
        a, b = self.left.random(device), self.right.random(device)
        return lambda: torch.ops.aten._int_mm(a, b)


@dataclass(frozen=True)
class ScaledProduct(Int8Product):
    """The same, scaled by the kernel that computes it."""

    scales: tuple[Operand, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    """What the product is rounded to, and then the result of each multiplication."""
    rate: float = field(default=RATE, repr=False)
    through_python: bool = field(default=False, repr=False)

    @property
    def written(self) -> torch.dtype:
        return self.dtypes[-1]

    def prepare(self, device: torch.device) -> Run:
        a, b, *scales = (operand.random(device) for operand in (self.left, self.right, *self.scales))
        dtypes = [NAME_OF[dtype] for dtype in self.dtypes]
        return lambda: torch.ops.triptych.int_mm_mul(a, b, scales, dtypes)

    def like(self) -> Part:
        return self  # a scale may have as many rows as the product


def forms(
    m: Match, a: torch.Tensor, b: torch.Tensor, scales: Sequence[Node | float], dtypes: Sequence[torch.dtype]
) -> tuple[Work, Work]:
    """The product with a kernel that scales it, and our kernel, with what reads their results."""
    number = torch.empty((), dtype=torch.float32)
    tensors = [tensor_of(scale) if isinstance(scale, Node) else number for scale in scales]
    is_quick = m.program.options.is_replayed or is_launched(m.program.options, [a, b, *tensors])
    left, right, given = Operand.of(a), Operand.of(b), tuple(map(Operand.of, tensors))
    # the model does not know how efficient the kernels are
    product = Int8Product(left, right, error=UNKNOWN)
    fused = ScaledProduct(
        left, right, scales=given, dtypes=tuple(dtypes), error=UNKNOWN, through_python=not is_quick
    )
    old, new = Work.of(a.device, product), Work.of(a.device, fused)
    numbers = [scale for scale in scales if not isinstance(scale, Node)]
    if numbers:
        new += Moved(0, launches=len(numbers))  # they are first written to memory
    matrices = sum(scale.bytes for scale in given if scale.elements == product.elements)
    read = product.result_bytes + matrices
    if read_by_pointwise(m.program, m.root.node):  # then the kernels that read the result would scale the product
        return old + Moved(read, launches=0), new + Moved(fused.result_bytes, launches=0)
    return old + Moved(read + fused.result_bytes), new
