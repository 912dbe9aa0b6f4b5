"""Whether products of one activation are quicker as one product on a CPU: timed there where the cost model cannot tell.

The model of a CPU has the rates of a usual core. One with instructions for bfloat16 computes products in bfloat16 13 to
22 times as fast as the model says (an EPYC with AVX-512), so that the calls that joining saves look negligible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cost import Layout, can_measure, measured_in_turns, size_hint
from ..cost.device import precision_of_products
from ..cost.timing import Work
from ..ir.facts import tensor_of
from ..pre_grad.joined_products import ProductGroup
from ..rewrite.rule import Match

TOO_SHORT = 10e-6
"""Products that take less than this by the model are not timed. They are calls rather than arithmetic, which the model
knows, and the difference is a few microseconds."""
TOO_LONG = 0.03
"""Products that take longer than this many seconds by the model are not timed."""

Multiply = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""Multiplies an activation by the operands of one product: a weight with its bias, or with its scales."""


@dataclass(frozen=True)
class Operand:
    """A weight, bias or table of scales, of each product and of the joined one."""

    apart: tuple[Layout, ...]
    dim: int
    """The dimension along which those of the products are concatenated."""
    dtype: torch.dtype
    turned: bool = False
    """The product reads its transpose."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], dim: int, turned: bool = False) -> Operand:
        return cls(tuple(map(Layout.of, tensors)), dim, tensors[0].dtype, turned)

    def random(self) -> list[torch.Tensor]:
        if self.dtype.is_floating_point:
            return [layout.random(self.dtype, torch.device("cpu")) for layout in self.apart]
        sizes = (layout.shape for layout in self.apart)  # packed weights, which are contiguous
        return [torch.randint(0, 256, shape, dtype=torch.uint8).view(self.dtype) for shape in sizes]

    def joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.read(torch.cat(list(tensors), self.dim))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if self.turned else tensor

    @property
    def bytes(self) -> int:
        return sum(layout.bytes(self.dtype) for layout in self.apart)

    def __str__(self) -> str:
        layouts = " ".join(map(str, self.apart))
        return f"{layouts} {self.dtype} by {self.dim}{' turned' if self.turned else ''}"


@dataclass(frozen=True)
class JoinedOnCpu:
    """Everything that the times of such products depend on."""

    operation: str
    multiply: Multiply
    x: Layout
    dtype: torch.dtype
    operands: tuple[Operand, ...]
    sizes: tuple[int, ...]
    """The number of columns of each product."""
    copied: tuple[bool, ...]
    """Must this piece of the joined result be copied?"""
    once: bool
    """Are the operands concatenated once, before the first call?"""

    @classmethod
    def of(
        cls, operation: str, multiply: Multiply, group: ProductGroup, operands: Sequence[Operand],
        copied: Sequence[bool], once: bool,
    ) -> JoinedOnCpu:  # fmt: skip
        x = tensor_of(group.members[0].x)
        sizes = tuple(map(size_hint, group.sizes))
        return cls(operation, multiply, Layout.of(x), x.dtype, tuple(operands), sizes, tuple(copied), once)

    def timed(self) -> tuple[float, float] | None:
        """Seconds of the products apart, and of the joined one with all that is copied for it; None where they cannot
        be timed."""
        cpu = torch.device("cpu")
        result = math.prod(self.x.shape[:-1]) * sum(self.sizes) * self.dtype.itemsize
        needed = self.x.bytes(self.dtype) + 2 * sum(operand.bytes for operand in self.operands) + 3 * result
        if not can_measure(cpu, needed):
            return None
        question = f"{self.operation} {self.x} {self.dtype} by {'; '.join(map(str, self.operands))}"
        question += precision_of_products(self.dtype, cpu)
        how = f"{'once' if self.once else 'on each call'}, copied {[int(c) for c in self.copied]}"
        apart, joined = (f"apart: {question}", self._apart), (f"joined {how}: {question}", self._joined)
        times = measured_in_turns(cpu, apart, joined)
        return None if times is None else (times[0], times[1])

    def _apart(self) -> Work:
        x = self.x.random(self.dtype, torch.device("cpu"))
        products = [[o.read(t) for o, t in zip(self.operands, one)] for one in zip(*self._random())]
        return lambda: [self.multiply(x, one) for one in products]

    def _joined(self) -> Work:
        x, random = self.x.random(self.dtype, torch.device("cpu")), self._random()
        once = [operand.joined(tensors) for operand, tensors in zip(self.operands, random)]
        pieces = self.multiply(x, once).split(self.sizes, 1)
        pieces = [piece for piece, c in zip(pieces, self.copied) if c]
        copies = [torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces]

        def work() -> Any:
            joined = once if self.once else [o.joined(tensors) for o, tensors in zip(self.operands, random)]
            self.multiply(x, joined)
            if copies:  # in one call, as generated code does it
                torch.ops.aten._foreach_copy_(copies, pieces)

        return work

    def _random(self) -> list[list[torch.Tensor]]:
        return [operand.random() for operand in self.operands]


def require_quicker(
    m: Match, before: float, after: float, site: JoinedOnCpu, *, error: float, sure: bool = False
) -> None:
    """Leave the products alone unless the joined one is quicker, by the modelled seconds or, where those are within
    `error` of each other, by measured ones."""
    timed = site.timed if TOO_SHORT < before < TOO_LONG else None
    m.pays(before, after, sure, measure=timed, error=error)
