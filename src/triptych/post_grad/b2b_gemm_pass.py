"""`B2B_GEMM_PASS`: two products with a pointwise function between them in one kernel, if the middle matrix is far
larger than all the others.

The kernel computes a few columns of the middle matrix at a time and immediately multiplies them by C, so the middle
matrix is never written to memory. Sums are taken in another order, and the middle matrix is not rounded to 16 bits
before the function is applied.

Whether this pays is measured on the device, and the measurement is cached: the time of the two products and one pass
over the middle matrix is compared with that of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..ir.program import Program
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from ..rules import two_products
from ..rules.two_products import TwoProducts, is_on_gpu, require_far_larger, require_sizes, used_elsewhere

ALWAYS: dict[str, Any] = {"settings": {"always": True}, "dialects": ("aten",)}
SMALL = ("f32[9, 4]", "f32[4, 40]", "f32[40, 3]")
TURNED = ("f32[3, 40]", "f32[40, 4]", "f32[4, 9]")


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())


def _sign(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).float() - (x < 0).float()


@dataclass(frozen=True)
class FusedProducts(Rule):
    """mm(f(mm(A, B) + bias), C) -> triptych.b2b_gemm(A, B, C, bias, f), where f is pointwise; up to rounding

    mm(A, f(mm(B, C))) is the transpose of mm(f(mm(C^T, B^T)), A^T).
    """

    always: bool = False
    """On every device, whatever it costs: for tests of the rewrite itself."""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of("matmul", "addmm"):
            if node._erased or not (self.always or is_on_gpu(node)):
                continue
            if (found := TwoProducts.read(program, node)) is not None:
                used = next(found.uses_elsewhere, None)
                yield found.match(program, None if used is None else used_elsewhere(*used))

    def check(self, m):
        sizes = require_sizes(m)
        if self.always:
            return
        require_far_larger(m, sizes)
        # the cost model does not know how efficient the kernel is
        m.pays(*sizes.modelled(), measure=sizes.timed, error=math.inf)

    def rewrite(self, op, m):
        return two_products.fused(op, m)

    examples = [
        fires(lambda a, b, c: F.relu(a @ b) @ c, *SMALL, **ALWAYS),
        fires(lambda a, b, c: _gelu(a @ b) @ c, *SMALL, **ALWAYS),
        fires(lambda a, b, c: (lambda x: x * x.tanh())(a @ b) @ c, *SMALL, **ALWAYS),
        fires(
            lambda a: F.relu(a[:, :1].expand(a.shape[0], 4).exp() @ torch.ones(4, 40)) @ torch.ones(40, 3), "f32[9, 2]",
            **ALWAYS, dynamic=True,
        ),
        declines(lambda a, b, c: F.relu(a @ b) @ c, *SMALL, **ALWAYS, dynamic=True, because="the ends have"),
        fires(lambda a, b, c: a @ (lambda x: x / (1 + (-x).exp()))(b @ c), *TURNED, **ALWAYS),
        fires(lambda a, b, c: (a @ b).clamp(-1, 2).square() @ c, "bf16[9, 4]", "bf16[4, 40]", "bf16[40, 3]", **ALWAYS),
        fires(lambda a, b, c: (lambda x: torch.where(x > 0, x, x * 0.1))(a @ b) @ c, *SMALL, **ALWAYS),
        fires(lambda a, b, c: _sign(a @ b) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: (lambda x: (x > 0) + (x > 1))(a @ b).float() @ c, *SMALL, **ALWAYS),
        fires(
            lambda x, w, v, c, d: F.linear(F.relu(F.linear(x, w, v)), c, d),
            "f32[9, 4]", "f32[40, 4]", "f32[40]", "f32[3, 40]", "f32[3]", **ALWAYS,
        ),
        declines(lambda a, b, c: F.relu(a @ b) @ c, *SMALL, dialects=("aten",)),  # on a GPU only
        declines(lambda a, b, c: (y := F.relu(a @ b), y @ c), *SMALL, because="used elsewhere", **ALWAYS),
        declines(lambda a, b: (y := F.relu(a @ b)) @ y, "f32[9, 4]", "f32[4, 9]", because="used elsewhere", **ALWAYS),
        declines(lambda a, b, c: torch.addmm(y := F.relu(a @ b), y, c), "f32[9, 4]", "f32[4, 9]", "f32[9, 9]",
                 because="used elsewhere", **ALWAYS),
        declines(lambda a, b, c: (a @ b) @ c, *SMALL, **ALWAYS),
        fires(lambda a, b, c, v: (a @ b + v).relu() @ c, *SMALL, "f32[40]", **ALWAYS),
        # layers over a batch of sequences
        fires(
            lambda x, w, v, c, d: F.linear(F.relu(F.linear(x, w, v)), c, d),
            "f32[3, 3, 4]", "f32[40, 4]", "f32[40]", "f32[3, 40]", "f32[3]", **ALWAYS,
        ),
        fires(lambda a, b, c, v: (v + a @ b).relu() @ c, "f32[3, 3, 4]", *SMALL[1:], "f32[40]", **ALWAYS),
        declines(lambda a, b, c, v: (a @ b + v).relu() @ c, *SMALL, "f32[9, 1]", **ALWAYS),
        declines(lambda a, b, c, v: ((x := a @ b) * (x + v)) @ c, *SMALL, "f32[40]", **ALWAYS),
        declines(lambda a, b, c, v: ((a @ b + v) + v).relu() @ c, *SMALL, "f32[40]", **ALWAYS),
        declines(lambda a, b, c: (a @ b).relu().view(18, 20) @ c, *SMALL[:2], "f32[20, 3]", **ALWAYS),
        declines(
            lambda a, b, c: ((x := a @ b).view(1, 2, 4) * x.view(2, 1, 4)).view(4, 4) @ c,
            "f32[2, 4]", "f32[4, 4]", "f32[4, 3]", **ALWAYS,
        ),
        declines(lambda a, b, c: (a @ b).softmax(-1) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: ((a @ b) * (a @ b * 2)) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b).float() @ c, "bf16[9, 4]", "bf16[4, 40]", SMALL[2],
                 because="the products are", **ALWAYS),
        declines(lambda a, b, c: (lambda x: x - x.half().float())(a @ b) @ c, *SMALL, **ALWAYS),
        declines(lambda a, b, c, v: F.relu(a @ b + v).bfloat16() @ c, "bf16[9, 4]", "bf16[4, 40]", "bf16[40, 3]",
                 "f32[40]", **ALWAYS),
        declines(lambda a, b, c: F.relu(a @ b) @ c, "f64[9, 4]", "f64[4, 40]", "f64[40, 3]", **ALWAYS),
        declines(
            lambda a, b, c: F.relu(a @ b) @ c, "f32[9, 300]", "f32[300, 40]", "f32[40, 3]", because="the ends", **ALWAYS
        ),
        declines(
            lambda v, a, b, c: F.relu(torch.addmm(v, a, b, beta=2)) @ c, "f32[40]", *SMALL, **ALWAYS
        ),
        declines(
            lambda v, a, b, c: F.relu(torch.addmm(v, a, b)) @ c, "f32[9, 1]", *SMALL, because="no number", **ALWAYS
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class B2bGemmPass(Pass):
    """Two products with a pointwise function between them in one kernel that never writes the matrix between them.

    Where the backward of a training step reads that matrix, `recompute_between_products` decides, before the partition.
    """

    name = "B2B_GEMM_PASS"

    def rules(self) -> Sequence[Rule]:
        return (FusedProducts(),)
