"""`decompose_mem_bound_mm`: computes a product whose rows have only a few elements by pointwise operations.

Kernels for matrix products work on tiles, which such a product leaves nearly empty: 1048576 x 4 by 4 x 4 takes 52 us in
float32 on an H200, and 8 us as pointwise operations, which can besides be fused with the kernels before and after them.
Once the sum is too long for generated code to unroll, the product is the quicker of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..cost import UNKNOWN, DeviceModel, Part, Product, Work, read_and_written
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.sizes import elements
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule
from .neighbours import made_by_pointwise, read_by_pointwise

TILE, DEPTH = 64, 32
"""A GEMM kernel computes tiles of at least TILE rows and TILE columns, and sums at least DEPTH terms per element."""
PLAIN_RATE = 0.25
"""Pointwise kernels multiply and add at this fraction of the rate of a GEMM in float32."""
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which a GEMM accumulates."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}
ALWAYS: dict[str, Any] = {"settings": {"always": True}, **ATEN}


@dataclass(frozen=True)
class DecomposeMemBoundMm(Rule):
    """mm(a, b) -> sum(a[:, :, None] * b[None], 1), where a has a few columns and it is quicker; up to rounding"""

    always: bool = False
    """Rewrite without asking the cost model: for tests of the rewrite itself."""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, c: Tensor):
        return op.matmul(a, b) | op.addmm(c, a, b)

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        left = tensor_fact(call.args.get("mat1", call.args.get("self")))
        inner = left.shape[-1] if left is not None and left.dim() else None
        return isinstance(inner, int) and 0 < inner < _private.inductor_config.unroll_reductions_threshold

    def check(self, m, a, b, c):
        m.applies(m.root.known and a.known and b.known and a.rank == b.rank and a.rank in (2, 3) and a.is_float)
        inner = a.shape[-1]
        unrolled = isinstance(inner, int) and 0 < inner < _private.inductor_config.unroll_reductions_threshold
        m.applies(unrolled and m.program.options.codegen == "inductor")
        m.applies(a.rank == 2 or known_equal(a.shape[0], b.shape[0]))
        if self.always:
            return
        for value, times in ((a, b.shape[-1]), (b, a.shape[-2])):
            read_once = known_equal(times, 1) or not made_by_pointwise(m.program, value.node)
            m.require(read_once, "{at} would be computed again for each of {found} elements", at=value, found=times)
        m.pays(*_forms(m, a, b))

    def rewrite(self, op, a, b, c):
        wide = WIDE.get(a.dtype)
        left, right = (op.to(v, dtype=wide) if wide else v for v in (a, b))
        last = a.rank
        terms = op.mul(op.unsqueeze(left, last), op.unsqueeze(right, last - 2))
        total = op.sum(terms, [last - 1])
        if c is not None:
            total = op.add(total, op.to(c, dtype=wide) if wide else c)
        return op.to(total, dtype=a.dtype) if wide else total

    examples = [
        fires(lambda a, b: a @ b, "f32[64, 4]", "f32[4, 8]", **ALWAYS),
        fires(lambda a, b: (a @ b).relu(), "f32[64, 1]", "f32[1, 8]", **ALWAYS),
        fires(lambda a, b: (a @ b).relu(), "f32[4096, 1]", "f32[1, 64]", **ATEN),
        fires(lambda a, b: torch.bmm(a, b), "bf16[3, 16, 4]", "bf16[3, 4, 8]", **ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b.t()), "bf16[8]", "bf16[64, 4]", "bf16[8, 4]", **ALWAYS),
        fires(lambda a, b: a @ b, "f32[0, 4]", "f32[4, 8]", **ALWAYS),
        fires(lambda a, b: a[:, :4] @ b[:4], "f32[64, 6]", "f32[5, 8]", dynamic=True, **ALWAYS),
        declines(lambda a, b: a @ b, "f32[64, 4]", "f32[4, 8]", because="would cost", **ATEN),
        declines(lambda a, b: a.exp() @ b, "f32[64, 4]", "f32[4, 8]", because="computed again", **ATEN),
        declines(lambda a, b: a @ b, "f32[64, 16]", "f32[16, 8]", **ALWAYS),
        declines(lambda a, b: a @ b, "f32[64, 0]", "f32[0, 8]", **ALWAYS),
        declines(lambda a, b: a @ b, "f32[64, 4]", "f32[4, 8]", dynamic=True, **ALWAYS),
        declines(lambda c, a, b: torch.addmm(c, a, b, beta=0), "f32[8]", "f32[64, 4]", "f32[4, 8]", **ALWAYS),
        declines(lambda a, b: a @ b, "i64[64, 4]", "i64[4, 8]", **ALWAYS),
        declines(lambda a, b: a @ b, "f32[64, 4]", "f32[4, 8]", options={"codegen": "eager"}, **ALWAYS),
    ]  # fmt: skip


@dataclass(frozen=True)
class NarrowProduct(Product):
    """A product in which the tiles of a kernel are mostly empty."""

    def seconds(self, model: DeviceModel) -> float:
        batch, rows, columns, inner = self.sizes
        tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
        arithmetic = 2.0 * tiles * TILE * TILE * max(inner, DEPTH) / model.flops(self.dtype)
        return max(super().seconds(model), arithmetic if model.is_gpu else 0.0)


@dataclass(frozen=True)
class PlainArithmetic(Part):
    """Multiplications and additions of a pointwise kernel, as far as they take longer than what it reads and writes."""

    operations: float
    moved: float

    launches = 0

    def seconds(self, model: DeviceModel) -> float:
        return max(0.0, self.operations / (PLAIN_RATE * model.single) - self.moved / model.bandwidth)


def _forms(m: Match, a: Value, b: Value) -> tuple[Work, Work]:
    """The product, and the pointwise operations, which depend on what they are fused with."""
    result = tensor_of(m.root.node)
    # the model does not know which kernel computes a product with so few columns
    product = NarrowProduct.of(a.tensor, b.tensor, error=UNKNOWN)
    operands = tensor_of(a.node), tensor_of(b.node)
    operations = 2.0 * elements(result.shape) * a.shape[-1]
    # merged: the kernel that reads the result computes it, so it is never written to memory
    merged = read_by_pointwise(m.program, m.root.node, reductions=True)
    read = [read_and_written(result, launches=0)] if merged else []
    pointwise = read_and_written(*operands, launches=0) if merged else read_and_written(*operands, result)
    arithmetic = PlainArithmetic(operations, pointwise.bytes)
    return Work.of(a.device, product, read), Work.of(a.device, pointwise, arithmetic)
