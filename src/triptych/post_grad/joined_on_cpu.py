"""The work of products of one activation on a CPU that become one product: what is concatenated, and what is copied.

The model of a CPU has the rates of a usual core. One with instructions for bfloat16 computes products in bfloat16 13 to
22 times as fast as the model says (an EPYC with AVX-512), so that the calls that joining saves look negligible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..cost import Operand, OperatorCall, Work, size_hint
from ..ir.facts import tensor_of
from ..ir.program import Program
from ..pre_grad.joined_products import ProductGroup
from ..rewrite.rule import Match

TOO_SHORT = 10e-6
"""Products that take less than this by the model are not timed. They are calls rather than arithmetic, which the model
knows, and the difference is a few microseconds."""


def in_rows(tensor: torch.Tensor) -> Operand:
    """The tensor as the matrix that a product reads or writes."""
    *leading, columns = map(size_hint, tensor.shape)
    return Operand.of(tensor) if len(leading) == 1 else Operand.contiguous((math.prod(leading), columns), tensor.dtype)


def joined(tensors: Sequence[torch.Tensor], dim: int) -> Operand:
    """The concatenation of some tensors."""
    shape = [size_hint(size) for size in tensors[0].shape]
    shape[dim] = sum(size_hint(tensor.shape[dim]) for tensor in tensors)
    return Operand.contiguous(shape, tensors[0].dtype)


def concatenated(tensors: Sequence[torch.Tensor], dim: int) -> OperatorCall:
    """Concatenating them on each call."""
    operands = (tuple(map(Operand.of, tensors)), dim)
    return OperatorCall(torch.ops.aten.cat.default, operands, produced=joined(tensors, dim).bytes)


def copies(program: Program, group: ProductGroup, copied: Sequence[bool]) -> list[OperatorCall]:
    """Copying pieces of the joined result: generated code does it in one call."""
    results = [in_rows(tensor_of(m.node)) for m, c in zip(group.members, copied) if c]
    width = sum(map(size_hint, group.sizes))
    pieces = [(result, Operand(result.shape, (width, 1), result.dtype)) for result in results]
    in_one = program.options.codegen == "inductor"
    calls = [pieces] if in_one and pieces else [[piece] for piece in pieces]
    return [OperatorCall(torch.ops.aten._foreach_copy_.default, tuple(zip(*call))) for call in calls]


def require_quicker(m: Match, old: Work, new: Work) -> None:
    """Leave the products alone unless the joined one is quicker."""
    m.pays(replace(old, by_clock=old.seconds() > TOO_SHORT), new)
