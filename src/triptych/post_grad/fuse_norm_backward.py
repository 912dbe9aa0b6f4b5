"""`fuse_norm_backward`: the backward of a layer norm, and all sums over rows that gradients need there, in one kernel.

Inductor generates a kernel for the gradient of the normalised values, which sums along the rows, and another one for
the gradients of weight and bias, which sum over the rows and read the same matrices again. Often the bias of the linear
layer before the norm's input is the sum over the rows of the result: a third kernel. A GPU takes longer to start such
kernels than to run them, unless the matrices are large. For those, Inductor has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.facts import is_contiguous, is_static, tensor_of
from ..ir.program import Program
from ..kernels.norm_backward import LARGEST_ROW
from ..kernels.registry import KERNEL_DTYPES
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .batch_gradient_sums import MOST_ELEMENTS, SUM_PARTS
from .norm_backwards import NORM_BACKWARD, is_inline, norm_backwards


@dataclass(frozen=True)
class FusedNormBackward(Rule):
    """dx, sum(grad * xhat, rows), sum(grad, rows), sum(dx, rows) -> triptych::norm_backward(...), and
    triptych::sum_parts(...) of its partial sums; up to rounding

    dx is the gradient of a layer norm's input, cast to the dtype of the input, with the gradient that reaches the input
    by another path added. The last sum is there where a graph has it.
    """

    device: str = "cuda"

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor":
            return
        for norm, covers, inlined in norm_backwards(program, self.device):
            roots = norm.result, *(over_rows.result for over_rows in norm.sums.values())
            match = Match.at(program, *roots, covers=covers, before=min(roots), norm=norm)
            match.leave_behind(inlined)
            yield match

    def check(self, m, norm):
        given, x = [tensor_of(n) for n in norm.operands], tensor_of(norm.x)
        plain = all(is_static(t.shape) and is_contiguous(t) for t in given)
        m.require(plain, "an operand is not contiguous, or has symbolic sizes")
        other = next((t.dtype for t in given if t.dtype not in KERNEL_DTYPES), None)
        m.require(other is None, "the kernel does not take {found}", found=other)
        result = tensor_of(norm.result).dtype
        sentence = "the result is {found}, the normalised values were {wanted}"
        m.require(result == x.dtype, sentence, found=result, wanted=x.dtype)
        m.require(norm.columns <= LARGEST_ROW, "rows of {found} numbers", found=norm.columns, wanted=LARGEST_ROW)
        m.require(x.numel() > 0, "the matrices are empty")
        m.require(x.numel() <= MOST_ELEMENTS, "Inductor has a kernel for matrices of {found} elements", found=x.numel())
        late = next((n for n in norm.operands if not n < m.before), None)
        m.require(late is None, "{at} is computed after the first of the values to replace", at=late)
        first = min(*m.nodes, *m.leftovers)
        writer = m.program.aliasing.written_between(norm.operands, first, m.before)
        m.require(writer is None, "{at} writes to an operand in between", at=writer)
        inline = next((n for n in norm.matrices if is_inline(m.program, n, m.nodes)), None)
        sentence = "{at} is computed in the kernels that read it, and would have to be written to memory"
        m.require(inline is None, sentence, at=inline)
        m.pays(norm.apart(), norm.fused())

    def rewrite(self, op, norm):
        both = op.call(NORM_BACKWARD, *norm.arguments, *norm.how)
        parts, columns, sums = op.getitem(both, 1), norm.columns, {}
        for rounding in dict.fromkeys(over_rows.rounding for over_rows in norm.sums.values()):
            blocks = [block for block, over_rows in norm.sums.items() if over_rows.rounding == rounding]
            matrices = [op.slice(parts, 1, block * columns, (block + 1) * columns) for block in blocks]
            if len(blocks) == norm.blocks:
                matrices = [parts]
            totals = op.call(SUM_PARTS, matrices, [columns] * len(blocks), *rounding)
            for i, block in enumerate(blocks):
                total, shape = op.getitem(totals, i), list(tensor_of(norm.sums[block].result).shape)
                sums[block] = total if len(shape) == 1 else op.reshape(total, shape)
        return op.getitem(both, 0), *(sums[block] for block in norm.sums)


# ---- examples ----


def _frozen(g: Any, xhat: Any, rstd: Any, w: Any) -> Any:
    """The backward of a layer norm whose weights need no gradient."""
    size, weighted = g.shape[-1], g * w
    centred = weighted * size - weighted.sum([-1], keepdim=True)
    return rstd / size * (centred - xhat * (weighted * xhat).sum([-1], keepdim=True))


def _backward(g: Any, x: Any, mean: Any, rstd: Any, w: Any) -> tuple[Any, Any, Any]:
    """A layer norm's backward, decomposed."""
    xhat, rows = (x - mean) * rstd, list(range(x.dim() - 1))
    return _frozen(g, xhat, rstd, w), (g * xhat).sum(rows), g.sum(rows)


def _in_half(g: Any, x: Any, mean: Any, rstd: Any, w: Any) -> Any:
    dx, dw, db = _backward(g.float(), x.float(), mean, rstd, w.float())
    return dx.bfloat16(), dw.bfloat16(), db.bfloat16()


def _with_residual(g: Any, x: Any, mean: Any, rstd: Any, w: Any, added: Any) -> Any:
    dx, dw, db = _in_half(g, x, mean, rstd, w)
    total = (added + dx).view(-1, x.shape[-1])
    return total @ total.t(), total.sum(0, keepdim=True), dw, db


def _of_two_gradients(g: Any, x: Any, mean: Any, rstd: Any, w: Any, h: Any) -> Any:
    return _in_half(g + h, x, mean, rstd, w)


def _with_wide_residual(g: Any, x: Any, mean: Any, rstd: Any, w: Any, added: Any) -> Any:
    wide = added.float()
    dx, dw, db = _backward(g, x, mean, rstd, w)
    return wide + dx, dw, db


def _of_columns(g: Any, x: Any, mean: Any, rstd: Any, w: Any) -> Any:
    dx, dw, db = _backward(g, x, mean, rstd, w)
    return dx, dw, db, dx.sum(1)


def _of_other_bits(g: Any, x: Any, mean: Any, rstd: Any, w: Any) -> Any:
    """The last sum is that of float16 numbers with the bits of the bfloat16 numbers of dx."""
    dx, dw, db = _in_half(g, x, mean, rstd, w)
    return dx, dw, db, dx.view(torch.float16).sum([0, 1])


ROW, HALF_ROW = ("f32[64, 1]", "f32[64, 1]", "f32[16]"), ("f32[4, 16, 1]", "f32[4, 16, 1]", "bf16[16]")
GIVEN, HALVES = ("f32[64, 16]", "f32[64, 16]", *ROW), ("bf16[4, 16, 16]", "bf16[4, 16, 16]", *HALF_ROW)
ON_CPU: dict[str, Any] = {"dialects": ("aten",), "settings": {"device": "cpu"}}
FusedNormBackward.examples = [
    fires(_backward, *GIVEN, **ON_CPU),
    fires(_in_half, *HALVES, **ON_CPU),
    fires(_with_residual, *HALVES, "bf16[4, 16, 16]", **ON_CPU),
    fires(_of_two_gradients, *HALVES, "bf16[4, 16, 16]", **ON_CPU),
    fires(_of_columns, *GIVEN, **ON_CPU),
    fires(lambda *given: (y := _backward(*given)[0], y.sum(0).sin(), _backward(*given)[1:]), *GIVEN, **ON_CPU),
    fires(_of_other_bits, *HALVES, **ON_CPU),
    declines(_backward, *GIVEN, dialects=("aten",)),  # on a GPU only
    declines(_backward, *GIVEN, **ON_CPU, dynamic=True),
    declines(lambda g, x, *others: (_backward(g, x, *others), g.new_ones(x.shape[0] * x.shape[1])), *GIVEN, **ON_CPU,
             dynamic=True),
    declines(_backward, "f32[64, 16]", "f32[64, 16]", "f32[1, 1]", "f32[64, 1]", "f32[16]", **ON_CPU),
    declines(_backward, "f32[64, 16]", "f32[64, 16]", "f32[64, 1]", "f32[16]", "f32[16]", **ON_CPU),
    declines(_backward, "f32[0, 16]", "f32[0, 16]", "f32[0, 1]", "f32[0, 1]", "f32[16]", **ON_CPU, because="are empty"),
    declines(_backward, *(f"f64[{size}" for size in ("64, 16]", "64, 16]", "64, 1]", "64, 1]", "16]")), **ON_CPU),
    declines(lambda g, x, mean, rstd, w: _backward(g, x, mean, rstd, w.double()), *GIVEN, **ON_CPU,
             because="does not take"),
    declines(_with_wide_residual, *GIVEN, "bf16[64, 16]", **ON_CPU, because="would have to be written"),
    declines(lambda g, *others: _backward(g.sin(), *others), *GIVEN, **ON_CPU, because="would have to be written"),
    declines(lambda g, x, *others: _backward(g, x.t(), *others), "f32[64, 64]", "f32[64, 64]", "f32[64, 1]",
             "f32[64, 1]", "f32[64]", **ON_CPU, because="not contiguous"),
    fires(lambda g, *others: (h := g.sin(), _backward(h, *others)), *GIVEN, **ON_CPU),  # written in any case
    declines(lambda g, x, mean, rstd, w: _frozen(g, (x - mean) * rstd, rstd, w), *GIVEN, **ON_CPU),
    declines(lambda g, x, mean, rstd, w: _backward(g, x, mean, rstd, w[:, None]), "f32[16, 16]", "f32[16, 16]",
             "f32[16, 1]", "f32[16, 1]", "f32[16]", **ON_CPU),
]  # fmt: skip


@dataclass(frozen=True)
class FuseNormBackward(Pass):
    """On a GPU, computes the backward of a layer norm and all gradients that are sums over its rows in one kernel."""

    name = "fuse_norm_backward"

    def rules(self) -> Sequence[Rule]:
        return (FusedNormBackward(),)
