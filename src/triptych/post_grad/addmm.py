"""`addmm` and `unfuse_bias_add_to_pointwise`: is a bias added by the GEMM or by the kernel that reads its result?

Generated code fuses the pointwise operations and reductions that follow a GEMM into one kernel, in which adding the
bias costs nothing. Without such a kernel, the sum would be a separate kernel that reads and writes the whole result,
and it is cheaper to let the GEMM add the bias. On a GPU, a bias of one row is added in the GEMM's epilogue; any other
bias is first copied into the result, which the GEMM then reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..cost import Moved, Product, Work, bytes_of, read_and_written
from ..cost.device import HALF
from ..ir.facts import known_equal
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule
from .neighbours import read_by_pointwise

NAN = torch.full((4, 6), torch.nan)
ATEN: dict[str, Any] = {"dialects": ("aten",)}
ALWAYS: dict[str, Any] = {"settings": {"always": True}, **ATEN}
EAGER: dict[str, Any] = {"options": {"codegen": "eager"}}


class Addmm(Rule):
    """add(mm(a, b), c) -> addmm(c, a, b), where no other kernel can do the sum; up to rounding

    The result is rounded once instead of twice. The `alpha` of the sum becomes the `alpha` of `addmm` if it scales the
    product, and its `beta` if it scales c. The rule declines if it is 0, infinite or NaN: `addmm` does not read an
    operand that it scales by 0, where 0 * NaN would be NaN; and it may scale the terms of the product before it adds
    them up, which can give NaN where the scaled sum is infinite.
    """

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, c: Tensor, scale, shape):
        product = op.optional("reshape", op.matmul(a, b), shape)
        return op.any_of(op.add(product, c, alpha=scale), op.add(c, product, alpha=scale))

    def check(self, m, a, b, c, scale, shape):
        m.applies(m.root.known and c.known and a.rank == b.rank == 2 and a.is_float)
        usual = isinstance(scale, (int, float)) and scale != 0 and math.isfinite(scale)
        m.require(usual, "the scale is {found}", found=scale)
        m.require(c.device == a.device, "the operands are on different devices", at=c)
        columns = b.shape[1]
        m.require(known_equal(m.root.shape, (a.shape[0], columns) if shape is None else tuple(shape)),
                  "{at} is larger than the product", at=c)  # fmt: skip
        if shape is not None:
            row = m.root.rank > 0 and known_equal(m.root.shape[-1], columns) and c.rank <= 1
            m.require(row, "{at} is not one row of the product", at=c)
        m.applies(not _has_reader(m), "a kernel that reads the sum can add the bias")
        product, added = Product.of(a.tensor, b.tensor), 2 * bytes_of(m.root.tensor) + bytes_of(c.tensor)
        # a library for CPUs runs the same kernel and adds its result to a copy of the bias
        fused = [Product.of(a.tensor, b.tensor, c.tensor)]
        in_place = fused if a.device.type == "cuda" else [product, Moved(added, launches=0)]
        m.pays(Work.of(a.device, product, Moved(added)), Work.of(a.device, in_place))

    def rewrite(self, op, m, a, b, c, scale, shape):
        scales_bias = m.root.call.args["other"] is c.node
        how = {} if scale == 1 else {"beta": scale} if scales_bias else {"alpha": scale}
        with m.program.without_guards():  # the check has proved the shape for all sizes
            result = op.addmm(c, a, b, **how)
        return result if shape is None else op.reshape(result, list(m.bindings["shape"]))

    examples = [
        fires(lambda a, b, c: a @ b + c, "f32[4, 5]", "f32[5, 6]", "f32[6]"),
        fires(lambda a, b, c: c + torch.mm(a, b), "bf16[4, 5]", "bf16[5, 6]", "bf16[6]"),
        fires(lambda a, b, c: torch.add(a @ b, c, alpha=3), "f32[4, 5]", "f32[5, 6]", "f32[6]"),
        fires(lambda a, b, c: torch.add(c, a @ b, alpha=-0.5), "f32[4, 5]", "f32[5, 6]", "f32[6]"),
        fires(lambda a, b, c: a @ b + c, "f32[4, 5]", "f32[5, 6]", "f32[4, 1]"),
        fires(lambda a, b, c: a @ b + c, "f64[4, 5]", "f64[5, 6]", "f64[]"),
        fires(lambda a, b, c: (a @ b).view(2, 2, 6) + c, "f32[4, 5]", "f32[5, 6]", "f32[6]", **ATEN),
        fires(lambda a, b, c: a @ b + c, "f32[4, 0]", "f32[0, 6]", "f32[6]"),
        fires(lambda a, b, c: a @ b + c, "f32[4, 5]", "f32[5, 6]", "f32[6]", dynamic=True),
        fires(lambda a, b, c: (a @ b + c).relu(), "f32[4, 5]", "f32[5, 6]", "f32[6]", **EAGER),
        declines(lambda a, b, c: (a @ b + c).relu(), "f32[4, 5]", "f32[5, 6]", "f32[6]"),
        declines(lambda a, b, c: (a @ b + c).sum(0), "f32[4, 5]", "f32[5, 6]", "f32[6]"),
        declines(lambda a, b, c: torch.add(a @ b, c, alpha=0), "f32[4, 5]", "f32[5, 6]", NAN, because="the scale is 0"),
        declines(lambda a, b, c: torch.add(c, a @ b, alpha=0), "f32[4, 5]", "f32[5, 6]", "f32[6]",
                 because="the scale is 0"),
        declines(lambda a, b, c: torch.add(c, a @ b, alpha=torch.inf), "f32[4, 5]", "f32[5, 6]", "f32[6]",
                 because="the scale is inf"),
        declines(lambda a, b, c: a @ b + c, "f32[4, 5]", "f32[5, 6]", "f64[6]", because="different dtypes"),
        declines(lambda a, b, c: a @ b + c, "f32[1, 5]", "f32[5, 6]", "f32[4, 6]", because="larger than the product"),
        declines(lambda a, b, c: (a @ b).view(2, 2, 6) + c, "f32[4, 5]", "f32[5, 6]", "f32[2, 1, 6]",
                 because="not one row", **ATEN),
        declines(lambda a, b, c: (y := a @ b, y + c), "f32[4, 5]", "f32[5, 6]", "f32[6]",
                 because="outside the pattern"),
        declines(lambda a, b: a @ b + 1, "f32[4, 5]", "f32[5, 6]"),
        declines(lambda a, b, c: a @ b + c, "i64[4, 5]", "i64[5, 6]", "i64[6]"),
        declines(lambda a, b, c: (y := a @ b, c.add_(1), y + c)[2], "f32[4, 5]", "f32[5, 6]", "f32[6]",
                 dialects=("torch",), because="in between"),
    ]  # fmt: skip


@dataclass(frozen=True)
class UnfuseBiasAddToPointwise(Rule):
    """addmm(c, a, b) -> mm(a, b) + c, where a pointwise kernel reads the sum and adds for less; up to rounding

    With `beta=0` nothing is added: c is not read, even if it contains NaN. Otherwise the rule declines in half
    precision, because the product would be rounded before the sum, and on a CPU, where neither form is quicker.
    """

    always: bool = False
    """Rewrite on every device and without asking the cost model: for tests of the rewrite itself."""

    exact = False

    def pattern(self, op, c: Tensor, a: Tensor, b: Tensor, beta, alpha):
        return op.addmm(c, a, b, beta=beta, alpha=alpha)

    def check(self, m, c, a, b, beta, alpha):
        m.applies(m.root.known and c.known and a.known and b.known)
        numbers = all(isinstance(s, (int, float)) for s in (alpha, beta))
        m.require(numbers and alpha == 1, "the product is scaled by {found}", found=alpha)
        if beta == 0:
            return  # the same product; c is not read
        m.applies(_has_reader(m), "no kernel that reads the sum could add the bias")
        m.applies(self.always or a.device.type == "cuda")
        m.require(a.dtype not in HALF, "the product would be rounded to {found} before the sum", found=a.dtype)
        m.applies(known_equal(m.root.shape, (a.shape[0], b.shape[1])))
        if not self.always:
            added_later = Product.of(a.tensor, b.tensor), read_and_written(c.tensor, launches=0)
            m.pays(Work.of(a.device, Product.of(a.tensor, b.tensor, c.tensor)), Work.of(a.device, added_later))

    def rewrite(self, op, c, a, b, beta):
        product = op.matmul(a, b)
        if beta == 0:
            return product
        return op.add(product, c) if beta == 1 else op.add(product, c, alpha=beta)

    examples = [
        fires(lambda c, a, b: torch.addmm(c, a, b).relu(), "f32[6]", "f32[4, 5]", "f32[5, 6]", **ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b, beta=2.5).relu(), "f32[4, 6]", "f32[4, 5]", "f32[5, 6]", **ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b).view(2, 12).exp() * 2, "f32[6]", "f32[4, 5]", "f32[5, 6]", **ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b).relu(), "f32[6]", "f32[4, 0]", "f32[0, 6]", **ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b).relu(), "f32[6]", "f32[4, 5]", "f32[5, 6]", dynamic=True, **ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b, beta=0), NAN, "f32[4, 5]", "f32[5, 6]", **ATEN),
        fires(lambda c, a, b: torch.addmm(c, a, b, beta=0), "bf16[6]", "bf16[4, 5]", "bf16[5, 6]", **ATEN),
        declines(lambda c, a, b: torch.addmm(c, a, b).relu(), "f32[6]", "f32[4, 5]", "f32[5, 6]", **ATEN),
        declines(lambda c, a, b: torch.addmm(c, a, b), "f32[6]", "f32[4, 5]", "f32[5, 6]", **ALWAYS),
        declines(lambda c, a, b: torch.addmm(c, a, b).relu(), "f32[6]", "f32[4, 5]", "f32[5, 6]", **ALWAYS, **EAGER),
        declines(lambda c, a, b: (y := torch.addmm(c, a, b), y.relu()), "f32[6]", "f32[4, 5]", "f32[5, 6]", **ALWAYS),
        declines(lambda c, a, b: torch.addmm(c, a, b).relu(), "bf16[6]", "bf16[4, 5]", "bf16[5, 6]",
                 because="rounded", **ALWAYS),
        declines(lambda c, a, b: torch.addmm(c, a, b, alpha=2).relu(), "f32[6]", "f32[4, 5]", "f32[5, 6]",
                 because="scaled by 2", **ALWAYS),
    ]  # fmt: skip


def _has_reader(m: Match) -> bool:
    return read_by_pointwise(m.program, m.root.node, reductions=True)
