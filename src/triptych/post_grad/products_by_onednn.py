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

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cost import can_measure, device_model, measured_in_turns, size_hint
from ..cost.decision import GAIN
from ..cost.device import precision_of_products, products_of_float32_on_a_cpu
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
        product = _Product.of(a, b, bias)
        m.applies(self.always or product.work >= LEAST_WORK)
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
        m.pays(product.modelled, product.modelled, measure=product.timed, error=math.inf)

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
class _Product:
    """What the time of a product depends on."""

    rows: int
    inner: int
    columns: int
    turned: tuple[bool, bool]
    """Which operands are stored column by column."""
    has_bias: bool

    @staticmethod
    def of(a: Value, b: Value, bias: Value | None) -> _Product:
        rows, inner, columns = (size_hint(size) for size in (*a.shape, b.shape[1]))
        first, second = (known(tensor_of(value.node).stride(0) == 1) for value in (a, b))
        return _Product(rows, inner, columns, (first, second), bias is not None)

    @property
    def work(self) -> int:
        return self.rows * self.inner * self.columns

    @property
    def modelled(self) -> float:
        return device_model("cpu").gemm(self.rows, self.columns, self.inner, torch.float32)

    def timed(self) -> tuple[float, float] | None:
        """Seconds by BLAS and by oneDNN. If oneDNN is not quicker at the usual sizes, these are not timed."""
        usual = USUAL.on_this_machine()
        like = USUAL if usual is None or usual[1] >= GAIN * usual[0] else self._cut()
        times = like.on_this_machine()
        return None if times is None else (times[0] * self.work / like.work, times[1] * self.work / like.work)

    def _cut(self) -> _Product:
        rows, inner, columns = (min(size, LARGEST_TIMED) for size in (self.rows, self.inner, self.columns))
        return replace(self, rows=rows, inner=inner, columns=columns)

    def on_this_machine(self) -> tuple[float, float] | None:
        device, needed = torch.device("cpu"), 8 * (self.rows + self.columns) * (self.inner + self.columns)
        if not can_measure(device, needed):
            return None
        product = f"{self}{precision_of_products(torch.float32, device)}"
        times = measured_in_turns(
            device,
            (f"product by BLAS {product}", functools.partial(self._prepare, _by_blas)),
            (f"product by oneDNN {product}", functools.partial(self._prepare, _by_onednn)),
        )
        return None if times is None else (times[0], times[1])

    def _prepare(self, multiply: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        shapes = zip(((self.rows, self.inner), (self.inner, self.columns)), self.turned)
        a, b = (_random(*shape[::-1]).t() if turned else _random(*shape) for shape, turned in shapes)
        bias = _random(self.columns) if self.has_bias else None
        return lambda: multiply(a, b, bias)


USUAL = _Product(256, 256, 256, (False, True), has_bias=False)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")  # whatever the defaults of the program are


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
