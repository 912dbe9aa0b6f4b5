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
from ..cost import DeviceModel, bytes_of, device_model, size_hint
from ..cost.timed import timed
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact, tensor_of
from ..ir.program import Program, Value
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
        before, after = _seconds(m, a, b)
        # the cost model does not know which kernel computes a product with so few columns
        m.pays(before, after, measure=lambda: _timed(m, a, b, after), error=math.inf)

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


def _seconds(m: Match, a: Value, b: Value) -> tuple[float, float]:
    """Modelled seconds of the product and of the pointwise form."""
    model = device_model(a.device)
    read, written = bytes_of(tensor_of(a.node)) + bytes_of(tensor_of(b.node)), bytes_of(tensor_of(m.root.node))
    merged = read_by_pointwise(m.program, m.root.node, reductions=True)
    # merged: the kernel that reads the result computes it, so it is never written to memory
    before = _product_seconds(model, a, b) + (written / model.bandwidth if merged else 0.0)
    arithmetic = 2.0 * written / m.root.dtype.itemsize * a.shape[-1] / (PLAIN_RATE * model.single)
    moved = read if merged else read + written
    return before, (0.0 if merged else model.launch) + max(moved / model.bandwidth, arithmetic)


def _product_seconds(model: DeviceModel, a: Value, b: Value) -> float:
    batch, rows, inner, columns = _sizes(a, b)
    tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
    arithmetic = 2.0 * tiles * TILE * TILE * max(inner, DEPTH) / model.flops(a.dtype)
    padded = model.launch + arithmetic if a.device.type == "cuda" else 0.0
    return max(model.gemm(rows, columns, inner, a.dtype, batch), padded)


def _sizes(a: Value, b: Value) -> tuple[int, int, int, int]:
    rows, inner, columns = (size_hint(s) for s in (*a.shape[-2:], b.shape[-1]))
    return math.prod(size_hint(s) for s in a.shape[:-2]), rows, inner, columns


def _timed(m: Match, a: Value, b: Value, after: float) -> tuple[float, float] | None:
    """Seconds of the product, measured on the device, and of the pointwise form, which depends on the operations that
    it is fused with and is therefore modelled."""
    merged = read_by_pointwise(m.program, m.root.node, reductions=True)

    def costs(model: DeviceModel) -> tuple[float, float]:
        written = bytes_of(tensor_of(m.root.node)) / model.bandwidth if merged else 0.0
        return model.product(tensor_of(a.node), tensor_of(b.node)) + written, after

    return timed(a.device, costs)
