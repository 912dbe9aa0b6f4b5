"""use_triton_dot_compress: computes compressed dot products of all pairs of rows without materialising the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Operand, OperatorCall, Product, Work
from ..ir.facts import known_equal
from ..ir.program import Value
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .normalized_nodes import NormalizedLinearNode

SHARED = ("f32[2, 16, 4]", "f32[16, 3]")
OWN = ("f32[2, 16, 4]", "f32[2, 16, 3]")


def all_pairs(op: Any, x: Any) -> Any:
    """Pattern of the dot products of all pairs of rows."""
    return op.matmul(x, op.permute(x, [0, 2, 1]))


def check_compression(m: Match, x: Value, scores: Node, w: torch.Tensor) -> None:
    """w: (n, k), or one for each batch element."""
    m.require_no_other_user(scores, reason="{at} is used elsewhere, by {found}, and would be computed anyway")
    computes = "the product computes in {found}, but x is {wanted}"
    m.require(x.is_float and m.root.dtype == x.dtype, computes, at=x, wanted=x.dtype, found=m.root.dtype)
    pairs, given = Operand.of(x.tensor), Operand.of(w)
    b, n, d = pairs.shape
    weight = given if len(given.shape) == 3 else given.for_each(b)
    compressed = Operand.contiguous((b, d, weight.shape[-1]), x.dtype)
    old = Product(pairs, pairs.mT), Product(Operand.contiguous((b, n, n), x.dtype), weight)
    both = Product(pairs.mT, weight), Product(pairs, compressed)
    kernel = OperatorCall(torch.ops.triptych.dot_compress.default, (pairs, given), does=both, precision=x.dtype)
    m.pays(Work.of(x.device, old), Work.of(x.device, kernel))


class DotCompress(Rule):
    """matmul(matmul(x, x.transpose(1, 2)), w) -> triptych.dot_compress(x, w), which is x (x^T w); up to rounding"""

    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, w: Tensor):
        return op.matmul(all_pairs(op, x), w)

    def check(self, m, x, w):
        m.applies(x.rank == 3 and w.rank in (2, 3), "not a batch of matrices")
        one_for_all = "w is broadcast over the batch"
        m.require(w.rank == 2 or known_equal(w.shape[0], x.shape[0]), one_for_all, at=w)
        check_compression(m, x, m.root.call.args["self"], w.tensor)

    def rewrite(self, op, x, w):
        return op.call(torch.ops.triptych.dot_compress.default, x, w)

    examples = [
        fires(lambda x, w: x @ x.transpose(1, 2) @ w, *SHARED, dialects=["torch"]),
        fires(lambda x, w: torch.matmul(torch.bmm(x, x.mT), w), *SHARED, dialects=["torch"]),
        fires(lambda x, w: torch.bmm(torch.bmm(x, x.permute(0, 2, 1)), w), *OWN),
        fires(lambda x, w: x.bmm(x.transpose(-1, -2)).bmm(w).relu(), "bf16[2, 16, 4]", "bf16[2, 16, 3]"),
        fires(lambda x, w: torch.bmm(torch.bmm(x, x.transpose(1, 2)), w), *OWN, dynamic=True),
        fires(lambda x, w: (t := x.mT, x @ t @ w), *SHARED, dialects=["torch"]),
        fires(lambda x, w: x @ x.mT @ w, "f32[0, 16, 4]", "f32[16, 3]", dialects=["torch"]),
        declines(lambda x, w: x @ (x.mT @ w), *SHARED, dialects=["torch"]),
        declines(lambda x, w: (s := x @ x.mT, s @ w), *SHARED, dialects=["torch"], because="used elsewhere"),
        declines(lambda x, y, w: x @ y.mT @ w, "f32[2, 16, 4]", "f32[2, 16, 4]", "f32[16, 3]", dialects=["torch"]),
        declines(lambda x, w: x.mT @ x @ w, "f32[2, 16, 4]", "f32[4, 3]", dialects=["torch"]),
        declines(lambda x, w: x @ x.mT @ w, "f32[2, 16, 64]", "f32[16, 64]", dialects=["torch"], because="would cost"),
        declines(lambda x, w: _written_between(x @ x.mT, x, w), *SHARED, dialects=["torch"], because="in between"),
        declines(lambda x, w: x @ x.mT @ w, "f32[2, 16, 4]", "f32[1, 16, 3]", dialects=["torch"],
                 because="w is broadcast"),
    ]  # fmt: skip


class DotCompressLinear(Rule):
    """linear(matmul(x, x.transpose(1, 2)), W, b) -> triptych.dot_compress(x, W^T) + b; up to rounding"""

    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, w: Tensor, b):
        return op.linear(all_pairs(op, x), w, bias=b)

    def check(self, m, x, w, b):
        m.applies(x.rank == 3 and w.rank == 2, "not a batch of matrices")
        check_compression(m, x, NormalizedLinearNode(m.root.node).get_input(), w.tensor.mT)

    def rewrite(self, op, x, w, b):
        y = op.call(torch.ops.triptych.dot_compress.default, x, op.permute(w, [1, 0]))
        return y if b is None else op.add(y, b)

    examples = [
        fires(lambda x, w, b: F.linear(x @ x.mT, w, b), "f32[2, 16, 4]", "f32[3, 16]", "f32[3]", dialects=["torch"]),
        fires(lambda x, w: F.linear(torch.bmm(x, x.transpose(1, 2)), weight=w).relu(), "f32[2, 16, 4]", "f32[3, 16]",
              dialects=["torch"], dynamic=True),
        fires(lambda x, w: F.linear(x @ x.mT, w), "bf16[2, 16, 4]", "bf16[3, 16]", dialects=["torch"]),
        declines(lambda x, w: (s := x @ x.mT, F.linear(s, w)), "f32[2, 16, 4]", "f32[3, 16]", dialects=["torch"],
                 because="used elsewhere"),
        declines(lambda x, w: F.linear(x @ x.mT, w), "f32[2, 16, 64]", "f32[64, 16]", dialects=["torch"],
                 because="would cost"),
        declines(lambda x, y, w: F.linear(x @ y.mT, w), "f32[2, 16, 4]", "f32[2, 16, 4]", "f32[3, 16]",
                 dialects=["torch"]),
    ]  # fmt: skip


def _written_between(scores: Any, x: Any, w: Any) -> Any:
    x.add_(1)
    return scores @ w


@dataclass(frozen=True)
class UseTritonDotCompress(Pass):
    """Computes compressed dot products of all pairs of rows, x x^T w, as x (x^T w): two thin products in one Triton
    kernel, without a matrix of all pairs. Up to rounding."""

    name: ClassVar[str] = "use_triton_dot_compress"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (DotCompress(), DotCompressLinear())
