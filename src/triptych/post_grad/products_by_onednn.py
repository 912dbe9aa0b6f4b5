"""`products_by_onednn`: on a CPU, computes float32 products by oneDNN where it is quicker than torch's BLAS library.

torch multiplies float32 matrices by a BLAS library, which for builds on x86 is MKL, and matrices of 16 bits by oneDNN.
On a CPU of another maker than its own, MKL uses narrower vectors than the CPU has: on one core of an EPYC with AVX-512,
oneDNN takes half its time from some millions of multiplications on. Where MKL uses the whole CPU, the two are alike.

Whether it pays is measured. Both libraries multiply a matrix of one size, once for a machine. If oneDNN is the quicker
one there, both are timed at the sizes of each product that is large enough; the answers are cached.

The operator takes the weight of a linear layer as it is, so nothing is packed and no weight can become stale. Its sums
are rounded twice as coarsely as those of MKL: random products differ from exact ones by 6e-7 of their size instead of
3e-7, for sums of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..cost import UNKNOWN, Operand, Part, Product, Work, size_hint
from ..cost.decision import choose
from ..cost.device import products_of_float32_on_a_cpu
from ..ir.facts import known, known_equal, tensor_of
from ..ir.program import Value
from ..kernels.onednn import linear_arguments, linear_operator
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .neighbours import generates_products

LEAST_WORK = 1 << 21
"""Multiplications of the smallest product that is considered: a call of oneDNN costs some microseconds more."""
LARGEST_TIMED = 512
"""A product is timed with each of its sizes cut to this: the ratio of the times hardly changes beyond."""
BY_BLAS = ("none", "ieee", "tf32")
"""Settings of torch with which it multiplies float32 matrices by BLAS, with `tf32` on CPUs that do not have it. With
`bf16` torch calls oneDNN itself."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}
ALWAYS: dict[str, Any] = {"settings": {"always": True}, **ATEN}


@dataclass(frozen=True)
class ProductsByOnednn(Rule):
    """mm(a, b), addmm(bias, a, b) -> mkldnn._linear_pointwise(a, b.t(), bias), in float32 where it is quicker; up to
    rounding"""

    always: bool = False
    """Rewrite without measuring: for tests of the rewrite itself."""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, bias: Tensor):
        return op.matmul(a, b) | op.addmm(bias, a, b)

    def check(self, m, a, b, bias):
        m.applies(m.root.known and a.known and b.known and a.rank == b.rank == 2 and m.root.device.type == "cpu")
        m.applies(a.dtype == b.dtype == torch.float32 and m.program.options.codegen == "inductor")
        m.applies(all(value.tensor.layout == torch.strided for value in (a, b)) and linear_operator() is not None)
        sizes = size_hint(a.shape[0]), size_hint(a.shape[1]), size_hint(b.shape[1])
        by_blas, by_onednn = by_both_libraries(sizes, (_is_turned(a), _is_turned(b)), bias is not None)
        m.applies(self.always or by_blas.flops >= 2 * LEAST_WORK)
        m.require(known(a.shape[1] > 0), "the sum may have no terms, which oneDNN does not support")
        if bias is not None:
            is_row = bias.known and bias.rank == 1 and known_equal(bias.shape[0], b.shape[1])
            m.require(is_row and bias.dtype == a.dtype, "{at} is no number for each column", at=bias)
        if self.always:
            return
        m.require(not generates_products(m.program.options), "Inductor generates and tunes its own products")
        m.require(torch.backends.mkldnn.enabled, "torch is set not to use oneDNN")
        precision = products_of_float32_on_a_cpu()
        m.require(precision in BY_BLAS, "torch is set to compute float32 products in {found}", found=precision)
        # nothing is assumed of the libraries: without a measurement, the product stays as it is
        cpu, tune = m.root.device, m.program.options.tune
        usual = choose(Work.of(cpu, USUAL[0]), Work.of(cpu, USUAL[1]), tune)
        m.require(usual.pays, "oneDNN is not quicker than BLAS on this machine: {found}", found=str(usual))
        m.pays(Work.of(cpu, by_blas), Work.of(cpu, by_onednn))

    def rewrite(self, op, a, b, bias):
        return op.call(linear_operator(), *linear_arguments(a, _transposed(op, b), bias))

    examples = [
        fires(lambda x, w, b: torch.nn.functional.linear(x, w, b), "f32[4, 16]", "f32[8, 16]", "f32[8]", **ALWAYS),
        fires(lambda a, b: a @ b, "f32[4, 16]", "f32[16, 8]", **ALWAYS),
        fires(lambda a, b: a.t() @ b.t(), "f32[16, 4]", "f32[8, 16]", **ALWAYS),
        fires(lambda a, b, c: torch.addmm(c, a[:, ::2], b.expand(8, 8)), "f32[4, 16]", "f32[8, 1]", "f32[8]", **ALWAYS),
        fires(lambda a, b: a @ b, "f32[0, 16]", "f32[16, 8]", **ALWAYS),
        fires(lambda a: a[:, :4] @ torch.ones(4, 8), "f32[6, 9]", dynamic=True, **ALWAYS),
        declines(lambda a, b: a @ b, "f32[4, 0]", "f32[0, 8]", because="no terms", **ALWAYS),
        declines(lambda a, b, c: torch.addmm(c, a, b), "f32[4, 16]", "f32[16, 8]", "f32[4, 8]", because="no number",
                 **ALWAYS),
        declines(lambda a, b, c: torch.addmm(c, a, b), "f32[4, 16]", "f32[16, 8]", "f32[1]", because="no number",
                 **ALWAYS),
        declines(lambda a, b, c: torch.addmm(c, a, b, alpha=2), "f32[4, 16]", "f32[16, 8]", "f32[8]", **ALWAYS),
        declines(lambda a, b: a @ b, "f64[4, 16]", "f64[16, 8]", **ALWAYS),
        declines(lambda a, b: a @ b, "bf16[4, 16]", "bf16[16, 8]", **ALWAYS),
        declines(lambda a, b: torch.bmm(a, b), "f32[2, 4, 16]", "f32[2, 16, 8]", **ALWAYS),
        declines(lambda a, b: a @ b, "f32[4, 16]", "f32[16, 8]", **ATEN),  # too small
        declines(lambda a, b: a @ b, "f32[128, 128]", "f32[128, 128]", options={"mode": "max-autotune"},
                 because="tunes its own", **ATEN),
        declines(lambda a, b: a @ b, "f32[4, 16]", "f32[16, 8]", options={"codegen": "eager"}, **ALWAYS),
    ]  # fmt: skip


def _transposed(op: Emitter, value: Value) -> Value:
    """The transpose, which is the operand itself of a value that is one already."""
    call = value.call
    if call is not None and call.op == "permute" and list(call.args["dims"]) == [1, 0]:
        return Value(value.program, call.args["self"])
    return op.permute(value, [1, 0])


@dataclass(frozen=True)
class ProductBy(Product):
    """A product by one of the libraries, whose rates the model does not know."""

    library: str = ""
    error: float = field(default=UNKNOWN, repr=False)

    def like(self) -> Part:
        left, right = _cut(self.left), _cut(self.right)
        added = None if self.added is None else _cut(self.added)
        return replace(self, left=left, right=right, added=added)

    def prepare(self, device: torch.device) -> Callable[[], torch.Tensor]:
        multiply = _by_blas if self.library == BLAS else _by_onednn
        a, b = self.left.random(device), self.right.random(device)
        bias = None if self.added is None else self.added.random(device)
        return lambda: multiply(a, b, bias)


BLAS, ONEDNN = "BLAS", "oneDNN"


def by_both_libraries(
    sizes: tuple[int, int, int], turned: tuple[bool, bool], has_bias: bool
) -> tuple[ProductBy, ProductBy]:
    """A product by BLAS and by oneDNN, of this many rows, inner elements and columns. `turned`: which operands are
    stored column by column."""
    rows, inner, columns = sizes
    left, right = _matrix(rows, inner, turned[0]), _matrix(inner, columns, turned[1])
    bias = Operand.contiguous((columns,), torch.float32) if has_bias else None
    return ProductBy(left, right, bias, library=BLAS), ProductBy(left, right, bias, library=ONEDNN)


def _is_turned(value: Value) -> bool:
    return known(tensor_of(value.node).stride(0) == 1)


def _matrix(rows: int, columns: int, turned: bool) -> Operand:
    if turned:
        return Operand.contiguous((columns, rows), torch.float32).mT
    return Operand.contiguous((rows, columns), torch.float32)


def _cut(operand: Operand) -> Operand:
    sizes = [min(size, LARGEST_TIMED) for size in operand.shape]
    if len(sizes) == 1 or operand.is_contiguous:
        return Operand.contiguous(sizes, operand.dtype)
    rows, columns = sizes
    return _matrix(rows, columns, turned=True)


USUAL = by_both_libraries((256, 256, 256), (False, True), has_bias=False)


def _by_blas(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _by_onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear_operator()(*linear_arguments(a, b.t(), bias))


@dataclass(frozen=True)
class ProductsByOnednnPass(Pass):
    """On a CPU, computes float32 products by oneDNN where that is quicker than torch's BLAS library. Up to rounding.

    oneDNN adds the product of two elements before it is rounded. So where such products overflow, elements of the
    result are infinite that are NaN with MKL.
    """

    name = "products_by_onednn"

    def rules(self) -> Sequence[Rule]:
        return (ProductsByOnednn(),)
