"""einsum_to_pointwise_pass: writes an einsum that is not a matrix product as multiplications.

Multiplications are fused with the operations around them, while each matrix product is a separate kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ir.facts import known_equal
from ..ir.program import Value
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Equation:
    """Indices of the operands and of the result."""

    operands: tuple[str, ...]
    result: str
    sizes: dict[str, list[Any]]
    """The size of an index in each operand that has it."""

    @property
    def contracted(self) -> list[str]:
        """Indices that several operands have and the result does not."""
        return [i for i, sizes in self.sizes.items() if len(sizes) > 1 and i not in self.result]

    def is_one(self, index: str) -> bool:
        return all(known_equal(size, 1) for size in self.sizes[index])


def read_equation(m: Match, equation: Any, tensors: Any) -> Equation:
    """Parses an equation of plain indices. Equations with `...` are not a match; operands whose diagonal is taken
    are declined."""
    m.applies(isinstance(equation, str) and "..." not in equation, "not an equation of plain indices")
    m.applies(isinstance(tensors, (list, tuple)) and all(isinstance(t, Value) and t.is_tensor for t in tensors), "")
    left, arrow, result = equation.replace(" ", "").partition("->")
    operands = tuple(left.split(","))
    m.applies(len(operands) == len(tensors), "the equation has another number of operands")
    counts = Counter("".join(operands))
    if not arrow:
        result = "".join(sorted(i for i, count in counts.items() if count == 1))
    m.applies(all(len(o) == t.rank for o, t in zip(operands, tensors)), "the equation has another number of dims")
    for indices, tensor in zip(operands, tensors):
        m.require(len(set(indices)) == len(indices), "the einsum takes a diagonal", at=tensor, found=indices)
    sizes: dict[str, list[Any]] = {}
    for indices, tensor in zip(operands, tensors):
        for index, size in zip(indices, tensor.shape):
            sizes.setdefault(index, []).append(size)
    return Equation(operands, result, sizes)


def multiplied(op: Emitter, einsum: Equation, tensors: Sequence[Value], wide: Any = None) -> Any:
    """The pointwise product of the operands, each brought to the dims (indices of the result, contracted indices)."""
    order = [*einsum.result, *einsum.contracted]
    product: Any = None
    for indices, value in zip(einsum.operands, tensors):
        factor = _aligned(op, indices, op.to(value, dtype=wide) if wide else value, order)
        product = factor if product is None else op.mul(product, factor)
    return product


def _aligned(op: Emitter, indices: str, value: Any, order: Sequence[str]) -> Any:
    alone = [d for d, index in enumerate(indices) if index not in order]
    if alone:  # as einsum does, sum an index that only this operand has first
        value = op.sum(value, dim=alone)
    rest = [i for i in indices if i in order]
    dims = [rest.index(i) for i in order if i in rest]
    if dims != sorted(dims):
        value = op.permute(value, dims)
    for d, index in enumerate(order):
        if index not in rest:
            value = op.unsqueeze(value, d)
    return value


class EinsumToProduct(Rule):
    """einsum("bi,bj->bij", a, b) -> a[:, :, None] * b[:, None, :], where no index of both operands is summed"""

    def pattern(self, op, equation, tensors):
        return op.einsum(equation, tensors)

    def check(self, m, equation, tensors):
        einsum = read_equation(m, equation, tensors)
        m.applies(len(tensors) <= 2, "einsum chooses the order of several products")
        m.require(not einsum.contracted, "a shared index is summed, as in a matrix product")

    def rewrite(self, op, equation, tensors, m):
        return multiplied(op, read_equation(m, equation, tensors), tensors)

    examples = [
        fires(lambda a, b: torch.einsum("i,j->ij", a, b).sum(0), "f32[4]", "f32[5]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("bi, bj -> bij", a, b) + 1, "f32[2, 4]", "f32[2, 5]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("bhd,d->bhd", a, b), "f32[2, 3, 4]", "f32[4]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("ij,i->ji", [a, b]).sum(), "f32[2, 4]", "f32[2]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("i,j", a, b).relu(), "f32[4]", "f32[5]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("ij,k->ik", a, b).sum(), "f32[2, 4]", "f32[3]", dialects=["torch"]),
        fires(lambda a: torch.einsum("ij->j", a), "f32[2, 4]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("i,i->i", a, b), "i64[4]", "i64[4]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("bi,bj->bij", a, b) * 2, "bf16[2, 4]", "bf16[2, 5]", dialects=["torch"],
              dynamic=True),
        fires(lambda a, b: torch.einsum("bi,bj->bij", a, b), "f32[0, 4]", "f32[0, 5]", dialects=["torch"]),
        declines(lambda a, b: torch.einsum("ij,jk->ik", a, b), "f32[2, 4]", "f32[4, 5]", dialects=["torch"],
                 because="a shared index is summed"),
        declines(lambda a: torch.einsum("ii->i", a), "f32[4, 4]", dialects=["torch"], because="diagonal"),
        declines(lambda a, b: torch.einsum("...i,i->...i", a, b), "f32[2, 4]", "f32[4]", dialects=["torch"]),
        declines(lambda a, b: torch.einsum("i,j->ij", a, b), "f32[4]", "f32[5]", dialects=["aten"]),
    ]  # fmt: skip


class EinsumOverOne(Rule):
    """einsum("bik,bkj->bij", a, b) -> a * b, where k has size 1; also products of several operands; up to
    rounding"""

    exact = False

    def pattern(self, op, equation, tensors):
        return op.einsum(equation, tensors)

    def check(self, m, equation, tensors):
        einsum = read_equation(m, equation, tensors)
        m.applies(len(tensors) > 2 or einsum.contracted, "nothing is contracted")
        m.require(all(einsum.is_one(i) for i in einsum.contracted), "a shared index is summed, as in a matrix product")

    def rewrite(self, op, equation, tensors, m):
        einsum = read_equation(m, equation, tensors)
        product = multiplied(op, einsum, tensors)
        ones = range(len(einsum.result), len(einsum.result) + len(einsum.contracted))
        return op.squeeze(product, dim=list(ones)) if einsum.contracted else product

    examples = [
        fires(lambda a, b: torch.einsum("bik,bkj->bij", a, b), "f32[2, 4, 1]", "f32[2, 1, 5]", dialects=["torch"]),
        fires(lambda a, b, c: torch.einsum("i,j,k->ijk", a, b, c) + 1, "f32[2]", "f32[3]", "f32[4]",
              dialects=["torch"]),
        fires(lambda a, b: torch.einsum("ik,jk->ij", a, b), "bf16[4, 1]", "bf16[5, 1]", dialects=["torch"]),
        declines(lambda a, b: torch.einsum("bik,bkj->bij", a, b), "f32[2, 4, 3]", "f32[2, 3, 5]", dialects=["torch"],
                 because="a shared index is summed"),
        declines(lambda a, b: torch.einsum("i,j->ij", a, b), "f32[4]", "f32[5]", dialects=["torch"]),
    ]  # fmt: skip


class EinsumToSum(Rule):
    """einsum("bhd,bhd->bh", a, b) -> (a * b).sum(-1), for a batch of dot products; up to rounding"""

    exact = False

    def pattern(self, op, equation, tensors):
        return op.einsum(equation, tensors)

    def check(self, m, equation, tensors):
        m.applies(m.program.options.codegen == "inductor", "no code generator fuses the product with the sum")
        einsum = read_equation(m, equation, tensors)
        m.applies(len(tensors) == 2 and any(not einsum.is_one(i) for i in einsum.contracted), "nothing is contracted")
        free = [i for i in einsum.result if len(einsum.sizes[i]) == 1 and not einsum.is_one(i)]
        m.require(not free, f"a matrix product, with rows or columns {', '.join(free)}")
        m.require(
            m.root.is_float and all(t.dtype == m.root.dtype for t in tensors),
            "the operands are not floats of one dtype",
        )

    def rewrite(self, op, equation, tensors, m):
        einsum = read_equation(m, equation, tensors)
        # a product sums 16-bit numbers in 32 bits
        product = multiplied(op, einsum, tensors, torch.float32 if m.root.dtype in NARROW else None)
        summed = op.sum(product, dim=list(range(len(einsum.result), len(einsum.result) + len(einsum.contracted))))
        return op.to(summed, dtype=m.root.dtype) if m.root.dtype in NARROW else summed

    examples = [
        fires(lambda a, b: torch.einsum("bhd,bhd->bh", a, b), "f32[2, 3, 8]", "f32[2, 3, 8]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("bd,bd->b", a, b), "bf16[8, 64]", "bf16[8, 64]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("i,i->", a, b), "f32[8]", "f32[8]", dialects=["torch"]),
        fires(lambda a, b: torch.einsum("bhd,dbh->hb", a, b).sum(), "f32[2, 3, 8]", "f32[8, 2, 3]",
              dialects=["torch"]),
        fires(lambda a, b: torch.einsum("bd,bd->b", a, b), "f32[8, 64]", "f32[8, 64]", dialects=["torch"],
              dynamic=True),
        declines(lambda a, b: torch.einsum("ij,jk->ik", a, b), "f32[2, 4]", "f32[4, 5]", dialects=["torch"],
                 because="rows or columns"),
        declines(lambda a, b: torch.einsum("ij,j->i", a, b), "f32[2, 4]", "f32[4]", dialects=["torch"],
                 because="rows or columns"),
        declines(lambda a, b: torch.einsum("i,i->", a, b), "i64[8]", "i64[8]", dialects=["torch"],
                 because="not floats of one dtype"),
        declines(lambda a, b: torch.einsum("i,i->", a, b), "f32[8]", "f32[8]", dialects=["torch"],
                 options={"codegen": "eager"}),
    ]  # fmt: skip


@dataclass(frozen=True)
class EinsumToPointwisePass(Pass):
    """Writes an einsum that contracts nothing, or only dims of size 1, as multiplications, and a batch of dot products
    as a multiplication and a sum.

    The latter only with Inductor's code generator, which makes one kernel of the two. Other contractions are matrix
    products and are left alone. Up to rounding, except for two operands without a contraction.
    """

    name: ClassVar[str] = "einsum_to_pointwise_pass"

    def rules(self) -> Sequence[Rule]:
        return (EinsumToProduct(), EinsumOverOne(), EinsumToSum())
