"""linear_permute_fusion, permute_linear_fusion, permute_matmul_fusion: a permute beside a product becomes a
transposed operand of the product.

A product can read and write transposed matrices, so a permute beside it is free unless it is followed by a copy. These
three passes remove the copies: explicit ones (`contiguous`), and those that torch makes when it folds a batch into
rows to multiply it with one weight. They decline where nothing is copied, since there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Operand, Product, Work, read_and_written, size_hint
from ..ir.facts import known, known_equal, same_layout, tensor_fact, tensor_of
from ..ir.program import Value
from ..ir.sizes import elements
from ..match.pattern import Ints, Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .normalized_nodes import NormalizedLinearNode, NormalizedMatmulNode

TURNING_COPY = 1.25
"""Cost of a transposing copy relative to a contiguous one; 1.1 to 1.5 was measured on CPUs."""


def swaps_last_two(dims: Any) -> bool:
    rank = len(dims)
    return rank >= 2 and list(dims) == [*range(rank - 2), rank - 1, rank - 2]


def read_in_place(value: torch.Tensor | None) -> bool:
    """Can a GEMM read these matrices without a copy: rows or columns dense, batches at a constant stride?"""
    if value is None or value.dim() < 2 or value.layout != torch.strided:
        return False
    *batch, rows, columns = range(value.dim())
    shape, stride = value.shape, value.stride()
    dense = (known_equal(stride[columns], 1) and known(stride[rows] >= shape[columns])) or (
        known_equal(stride[rows], 1) and known(stride[columns] >= shape[rows])
    )
    return dense and all(known_equal(stride[d], stride[d + 1] * shape[d + 1]) for d in batch[:-1])


def copied(op: Any, x: Any) -> Any:
    return op.contiguous(x) | op.clone(x, memory_format=torch.contiguous_format)


def turned(op: Emitter, value: Value) -> Any:
    """The value with its last two dims swapped; the operand itself if the value is such a swap already."""
    call = value.call
    if call is not None and call.op == "permute" and swaps_last_two(call.args["dims"]):
        return call.args["self"]
    rank = value.rank
    return op.permute(value, [*range(rank - 2), rank - 1, rank - 2])


def is_copy(m: Match, copy: Node, permuted: Node) -> None:
    """Checks that the copy is a real one: `contiguous` of a contiguous tensor copies nothing."""
    old, new = tensor_fact(permuted), tensor_fact(copy)
    m.applies(old is not None and new is not None and not same_layout(old, new), "nothing is copied")


def operand(m: Match, node: Node) -> Node:
    """The operand of an operation with one operand."""
    call = m.program.call(node)
    assert call is not None
    return call.args["self"]


def _folded(x: torch.Tensor, weight: torch.Tensor) -> Product:
    """x times the weight as one product, with the batch folded into rows."""
    n, k = weight.shape
    return Product.sized(elements(x.shape[:-1]), size_hint(n), size_hint(k), x.dtype)


# ---- permute, then matmul ----


class PermutedLeft(Rule):
    """matmul(contiguous(permute(a)), b) -> matmul(permute(a), b), which reads a in place; up to rounding"""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, dims: Ints):
        return op.matmul(copied(op, op.permute(a, dims)), b)

    def check(self, m, a, b, dims):
        _drops_copy(m, 0)

    def rewrite(self, op, a, b, dims):
        return op.matmul(op.permute(a, dims), b)

    examples = [
        fires(lambda a, b: a.transpose(-1, -2).contiguous() @ b, "f32[8, 4, 6]", "f32[8, 4, 5]", dialects=["torch"]),
        fires(lambda a, b: torch.mm(a.t().contiguous(), b), "f32[4, 6]", "f32[4, 5]"),
        fires(lambda a, b: torch.bmm(a.mT.contiguous(), b), "bf16[8, 4, 6]", "bf16[8, 4, 5]"),
        fires(lambda a, b: a.permute(0, 1, 3, 2).contiguous() @ b, "f32[2, 3, 4, 6]", "f32[2, 3, 4, 5]",
              dialects=["torch"]),
        fires(lambda a, b: a.mT.clone(memory_format=torch.contiguous_format) @ b, "f32[8, 4, 6]", "f32[8, 4, 5]",
              dialects=["torch"]),
        fires(lambda a, b: a.mT.contiguous() @ b, "f32[8, 4, 6]", "f32[8, 4, 5]", dynamic=True, dialects=["torch"]),
        declines(lambda a, b: a.mT @ b, "f32[8, 4, 6]", "f32[8, 4, 5]", dialects=["torch"]),
        declines(lambda a, b: (y := a.mT.contiguous(), y @ b), "f32[8, 4, 6]", "f32[8, 4, 5]",
                 because="outside", dialects=["torch"]),
        declines(lambda a, b: a.permute(2, 0, 1).contiguous() @ b, "f32[8, 4, 6]", "f32[6, 4, 5]",
                 because="cannot be read in place", dialects=["torch"]),
        declines(lambda a, b: _write_after(a.mT.contiguous(), a, b), "f32[8, 4, 6]", "f32[8, 4, 5]",
                 dialects=["torch"], because="in between"),
    ]  # fmt: skip


class PermutedRight(Rule):
    """matmul(a, contiguous(permute(b))) -> matmul(a, permute(b)), which reads b in place; up to rounding"""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, dims: Ints):
        return op.matmul(a, copied(op, op.permute(b, dims)))

    def check(self, m, a, b, dims):
        _drops_copy(m, 1)

    def rewrite(self, op, a, b, dims):
        return op.matmul(a, op.permute(b, dims))

    examples = [
        fires(lambda a, b: a @ b.transpose(1, 2).contiguous(), "f32[8, 4, 6]", "f32[8, 5, 6]", dialects=["torch"]),
        fires(lambda a, b: a.matmul(b.t().contiguous()), "f32[4, 6]", "f32[5, 6]"),
        fires(lambda q, k: q @ k.mT.contiguous(), "f32[2, 3, 4, 6]", "f32[2, 3, 5, 6]", dialects=["torch"]),
        declines(lambda a, b: a @ b.mT, "f32[8, 4, 6]", "f32[8, 5, 6]", dialects=["torch"]),
        fires(lambda a, b: a @ b.permute(1, 2, 0).contiguous(), "f32[8, 4, 6]", "f32[5, 8, 6]", dialects=["torch"]),
        declines(lambda a, b: a @ b.permute(2, 1, 0).contiguous(), "f32[8, 4, 6]", "f32[5, 6, 8]",
                 because="cannot be read in place", dialects=["torch"]),
    ]  # fmt: skip


class CopiedTurnedProduct(Rule):
    """contiguous(permute(matmul(a, b))) -> matmul(permute(b), permute(a)), which writes the transposed result; up to
    rounding"""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, dims: Ints):
        return copied(op, op.permute(op.matmul(a, b), dims))

    def check(self, m, a, b, dims):
        m.applies(swaps_last_two(dims) and a.rank == b.rank == len(dims), "the permute does not swap rows and columns")
        is_copy(m, m.root.node, operand(m, m.root.node))
        for value in (a, b):
            m.require(read_in_place(value.tensor), "an operand cannot be read in place", at=value)
        old, new = Product.of(a.tensor, b.tensor), Product.of(b.tensor.mT, a.tensor.mT)
        m.pays(Work.of(a.device, old, read_and_written(m.root.tensor, times=2)), Work.of(a.device, new))

    def rewrite(self, op, a, b):
        return op.matmul(turned(op, b), turned(op, a))

    examples = [
        fires(lambda a, b: (a @ b).transpose(-1, -2).contiguous(), "f32[8, 4, 6]", "f32[8, 6, 5]", dialects=["torch"]),
        fires(lambda a, b: torch.mm(a, b.t()).t().contiguous(), "f32[4, 6]", "f32[5, 6]"),
        fires(lambda a, b: (a.mT @ b.mT).mT.contiguous(), "f32[8, 6, 4]", "f32[8, 5, 6]", dialects=["torch"]),
        fires(lambda a, b: (a @ b).mT.contiguous(), "f32[8, 4, 6]", "f32[8, 6, 5]", dynamic=True, dialects=["torch"]),
        declines(lambda a, b: (a @ b).mT, "f32[8, 4, 6]", "f32[8, 6, 5]", dialects=["torch"]),
        declines(lambda a, b: (a @ b).mT.contiguous(), "f32[8, 4, 6]", "f32[6, 5]", dialects=["torch"]),
        declines(lambda a, b: (y := a @ b, y.mT.contiguous()), "f32[8, 4, 6]", "f32[8, 6, 5]",
                 because="outside", dialects=["torch"]),
        declines(lambda a, b: (a @ b).mT.contiguous(), "f32[8, 1, 6]", "f32[8, 6, 5]", dialects=["torch"]),
        declines(lambda a, b: (a @ b).permute(1, 0, 2).contiguous(), "f32[8, 4, 6]", "f32[8, 6, 5]",
                 dialects=["torch"]),
    ]  # fmt: skip


def _drops_copy(m: Match, side: int) -> None:
    """Checks that the product at the root can read the permuted value without the copy, and that this pays."""
    product = NormalizedMatmulNode(m.root.node)
    operands = [product.get_input(), product.get_other()]
    left, right = map(tensor_of, operands)
    copy = operands[side]
    permuted = operand(m, copy)
    is_copy(m, copy, permuted)
    m.require(not m.program.computed_once(copy), "the copy is computed once, before the first call", at=copy)
    m.require(read_in_place(tensor_fact(permuted)), "the permuted value cannot be read in place", at=permuted)
    m.applies(left.dim() == right.dim(), "one operand is a batch, the other a matrix")
    operands[side] = permuted
    copying = read_and_written(tensor_of(copy), times=2)
    in_place = Product.of(*map(tensor_of, operands))
    m.pays(Work.of(left.device, Product.of(left, right), copying), Work.of(left.device, in_place))


def _write_after(copy: Any, a: Any, b: Any) -> Any:
    a.add_(1)
    return copy @ b


@dataclass(frozen=True)
class PermuteMatmulFusion(Pass):
    """Removes the copy of a permuted operand of a product, and the copy of a permuted product: a GEMM reads and writes
    transposed matrices itself. Up to rounding."""

    name: ClassVar[str] = "permute_matmul_fusion"

    def rules(self) -> Sequence[Rule]:
        return (PermutedLeft(), PermutedRight(), CopiedTurnedProduct())


# ---- permute, then linear ----


class CopiedIntoLinear(Rule):
    """linear(contiguous(x.t()), W, b) -> linear(x.t(), W, b), which reads x in place; up to rounding"""

    exact = False

    def pattern(self, op, x: Tensor, w: Tensor, b, dims: Ints):
        return op.linear(copied(op, op.permute(x, dims)), w, bias=b)

    def check(self, m, x, w, b, dims):
        m.applies(list(dims) == [1, 0], "x is not a matrix: folding its batch into rows would copy it again")
        copy = NormalizedLinearNode(m.root.node).get_input()
        is_copy(m, copy, operand(m, copy))
        m.require(read_in_place(x.tensor), "x cannot be read in place", at=x)
        copy_fact, permuted = tensor_of(copy), tensor_of(operand(m, copy))
        old = Product.of(copy_fact, w.tensor.mT), read_and_written(copy_fact, times=2)
        m.pays(Work.of(x.device, old), Work.of(x.device, Product.of(permuted, w.tensor.mT)))

    def rewrite(self, op, x, w, b, dims):
        return op.linear(op.permute(x, dims), w, bias=b)

    examples = [
        fires(lambda x, w, b: F.linear(x.t().contiguous(), w, b), "f32[6, 4]", "f32[5, 6]", "f32[5]",
              dialects=["torch"]),
        fires(lambda x, w: F.linear(x.T.contiguous(), weight=w), "bf16[6, 4]", "bf16[5, 6]", dialects=["torch"]),
        declines(lambda x, w: F.linear(x.t(), w), "f32[6, 4]", "f32[5, 6]", dialects=["torch"]),
        declines(lambda x, w: F.linear(x.t().contiguous(), w), "f32[6, 1]", "f32[5, 6]", dialects=["torch"]),
    ]  # fmt: skip


class PermutedIntoLinear(Rule):
    """linear(x.transpose(1, 2), W, b) -> matmul(x.transpose(1, 2), W.t()) + b, which reads x in place; up to
    rounding"""

    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, w: Tensor, b, dims: Ints):
        permuted = op.permute(x, dims)
        return op.linear(op.any_of(op.contiguous(permuted), permuted), w, bias=b)

    def check(self, m, x, w, b, dims):
        m.applies(list(dims) == [0, 2, 1] and w.rank == 2, "x is not a batch of transposed matrices")
        source = NormalizedLinearNode(m.root.node).get_input()
        is_explicit = m.program.call(source).op == "contiguous"
        if is_explicit:
            is_copy(m, source, operand(m, source))
            m.require_no_other_user(source, reason="{at} is used elsewhere, by {found}, and would be computed anyway")
        else:
            m.require(w.tensor.requires_grad, "torch reads x in place already", at=x)
        m.require(not m.program.is_training, "the weight's gradient would be computed for each batch element first")
        m.require(read_in_place(x.tensor), "x cannot be read in place", at=x)
        addition = [read_and_written(m.root.tensor, times=2)] if b is not None else []
        turned_x, weight = Operand.of(x.tensor).mT, Operand.of(w.tensor).mT
        old = Work.of(x.device, _folded(tensor_of(source), w.tensor), read_and_written(x.tensor, times=2))
        # with a contiguous x the product itself adds the bias
        m.pays(
            old if is_explicit else old + addition,
            Work.of(x.device, Product(turned_x, weight.for_each(turned_x.shape[0])), addition),
        )

    def rewrite(self, op, x, w, b, dims):
        y = op.matmul(op.permute(x, dims), each_batch(op, op.permute(w, [1, 0]), x.shape[0]))
        return y if b is None else op.add(y, b)

    examples = lazily(lambda: [
        fires(lambda x, w: F.linear(x.transpose(1, 2).contiguous(), w), "f32[8, 64, 32]", "f32[5, 64]",
              dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x.mT.contiguous(), w, bias=b), "f32[8, 64, 32]", "f32[5, 64]", "f32[5]",
              dialects=["torch"]),
        fires(lambda x, w: F.linear(x.permute(0, 2, 1).contiguous(), w), "bf16[8, 64, 32]", "bf16[5, 64]",
              dialects=["torch"], dynamic=True),
        declines(lambda x, w: F.linear(x.transpose(1, 2), w), "f32[8, 64, 32]", "f32[5, 64]", dialects=["torch"],
                 because="reads x in place already"),
        declines(lambda x, w: F.linear(x.mT.contiguous(), w), "f32[8, 64, 32]",
                 torch.randn(5, 64, requires_grad=True), dialects=["torch"], because="gradient"),
        declines(lambda x, w, b: F.linear(x.mT.contiguous(), w, b), "f32[8, 4, 32]", "f32[64, 4]", "f32[64]",
                 dialects=["torch"], because="would cost"),
        declines(lambda x, w: F.linear(x.permute(1, 2, 0).contiguous(), w), "f32[8, 64, 32]", "f32[5, 8]",
                 dialects=["torch"]),
        declines(lambda x, w: (y := x.mT.contiguous(), F.linear(y, w)), "f32[8, 64, 32]", "f32[5, 64]",
                 dialects=["torch"], because="used elsewhere"),
    ])  # fmt: skip


def each_batch(op: Emitter, matrix: Any, batch: Any) -> Any:
    """The matrix expanded over a batch: otherwise torch would fold the batch into rows, with a copy."""
    known_matrix = op.program.value(getattr(matrix, "node", matrix))
    return op.expand(op.unsqueeze(known_matrix, 0), [batch, *known_matrix.shape])


@dataclass(frozen=True)
class PermuteLinearFusion(Pass):
    """Removes the copy of a permuted input of a linear layer: the product reads the input in place, for a batch as one
    product per batch element. Up to rounding.

    Otherwise torch copies a permuted batch, to fold it into the rows of one product.
    """

    name: ClassVar[str] = "permute_linear_fusion"

    def rules(self) -> Sequence[Rule]:
        return (CopiedIntoLinear(), PermutedIntoLinear())


# ---- linear, then permute ----


class LinearThenPermuted(Rule):
    """contiguous(linear(x, W, b).transpose(-1, -2)) -> matmul(W, x.transpose(-1, -2)) + b[:, None], which writes the
    transposed result; up to rounding"""

    exact = False

    def pattern(self, op, x: Tensor, w: Tensor, b, dims: Ints):
        return copied(op, op.permute(op.linear(x, w, bias=b), dims))

    def check(self, m, x, w, b, dims):
        m.applies(swaps_last_two(dims) and len(dims) in (2, 3) and w.rank == 2, "not a transposed linear layer")
        is_copy(m, m.root.node, operand(m, m.root.node))
        m.require(len(dims) == 2 or not m.program.is_training or not w.tensor.requires_grad,
                  "the weight's gradient would be computed for each batch element first")  # fmt: skip
        for value in (x, w):
            m.require(read_in_place(value.tensor), "an operand cannot be read in place", at=value)
        turned_x, weight = Operand.of(x.tensor).mT, Operand.of(w.tensor)
        if x.rank > 2:
            weight = weight.for_each(turned_x.shape[0])
        turning = read_and_written(m.root.tensor, times=2 * TURNING_COPY)
        adding = [] if b is None else [read_and_written(m.root.tensor, times=2)]
        new = Work.of(x.device, Product(weight, turned_x), adding)
        m.pays(Work.of(x.device, _folded(x.tensor, w.tensor), turning), new)

    def rewrite(self, op, x, w, b):
        weight = w if x.rank == 2 else each_batch(op, w, x.shape[0])
        y = op.matmul(weight, turned(op, x))
        return y if b is None else op.add(y, op.unsqueeze(b, 1))

    examples = [
        fires(lambda x, w: F.linear(x, w).transpose(1, 2).contiguous(), "f32[8, 32, 16]", "f32[64, 16]",
              dialects=["torch"]),
        fires(lambda x, w: F.linear(x, w).t().contiguous(), "f32[32, 16]", "f32[64, 16]", dialects=["torch"]),
        fires(lambda x, w: F.linear(x.transpose(1, 2), w).permute(0, 2, 1).contiguous(), "f32[8, 16, 32]",
              "f32[64, 16]", dialects=["torch"]),
        fires(lambda x, w: F.linear(x, w).mT.contiguous(), "f32[8, 32, 16]", "f32[64, 16]", dialects=["torch"],
              dynamic=True),
        fires(lambda x, w, b: F.linear(x, w, b).mT.contiguous(), "f32[8, 32, 16]", "f32[64, 16]", "f32[64]",
              dialects=["torch"]),
        declines(lambda x, w: F.linear(x, w).mT, "f32[8, 32, 16]", "f32[64, 16]", dialects=["torch"]),
        declines(lambda x, w: (y := F.linear(x, w), y.mT.contiguous()), "f32[8, 32, 16]", "f32[64, 16]",
                 dialects=["torch"], because="outside"),
        declines(lambda x, w: F.linear(x, w).permute(1, 0, 2).contiguous(), "f32[8, 32, 16]", "f32[64, 16]",
                 dialects=["torch"]),
    ]  # fmt: skip


@dataclass(frozen=True)
class LinearPermuteFusion(Pass):
    """Removes the copy of the transposed result of a linear layer: a product with its operands swapped writes the
    transposed result directly. Up to rounding."""

    name: ClassVar[str] = "linear_permute_fusion"

    def rules(self) -> Sequence[Rule]:
        return (LinearThenPermuted(),)
