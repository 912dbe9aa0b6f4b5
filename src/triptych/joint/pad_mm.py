"""`pad_mm`: pads the operands of products whose sizes are not aligned for tensor cores, where that is quicker.

Rows and columns added to the result are computed from zeros and cut off again, so nothing reads them. Along the summed
dim both operands are padded, so each added term is 0 * 0 = 0, even if the operands contain infinities or NaN elsewhere;
adding 0 changes only a sum of -0.0, which becomes 0.0. Another kernel computes the product, so sums may round
differently.

The layout decides which sizes must be aligned: the innermost dim of each operand and of the result, because these are
loaded and stored 16 bytes at a time. To decide whether padding pays, the products are timed on the device, and the
times are cached; the cost model adds the copies, and decides alone where nothing can be timed. Padding an operand costs
nothing where a pointwise kernel computes it, which can write it padded, or where it is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .padding_cost import ALIGNMENT, Padding, modelled, needed_padding, product_site, rows_lie_whole, timed
from .unaligned_linear import UnalignedLinear

ALWAYS = {"always": True}


@dataclass(frozen=True)
class PadMm(Rule):
    """a @ b -> (pad(a) @ pad(b))[:m, :n], where sizes are not aligned and it is quicker; up to rounding"""

    always: bool = False
    """Rewrite on every device and without asking the cost model: for tests of the rewrite itself."""
    measure: bool = True
    """Time the products on the device; otherwise, and where there is no device, the cost model decides."""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, c: Tensor, beta, alpha):
        return op.any_of(
            op.matmul(a, b),
            op.addmm(c, a, b, beta=beta, alpha=alpha),
            op.baddbmm(c, a, b, beta=beta, alpha=alpha),
        )

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        result = tensor_fact(node)
        return self.always or (result is not None and result.device.type == "cuda")

    def check(self, m, a, b, c):
        m.applies(m.root.known and a.known and b.known and a.rank == b.rank and a.rank in (2, 3))
        m.applies(a.dtype in ALIGNMENT and (self.always or a.device.type == "cuda"))
        m.applies(a.rank == 2 or known_equal(a.shape[0], b.shape[0]))
        padding = needed_padding(m, a.tensor, b.tensor)
        m.applies(padding != Padding())
        m.applies(all(not isinstance(s, int) or s > 0 for s in (*a.shape, *b.shape)))
        if c is not None:
            aligned = c.rank <= m.root.rank
            fits = aligned and _is_broadcast(c.shape, m.root.shape)
            m.require(fits, "the bias does not broadcast to the product", at=c, wanted=m.root.shape, found=c.shape)
        if not self.always:
            site = product_site(m, a, b, padding)
            measure = (lambda: timed(site)) if self.measure else None
            m.pays(*modelled(site), measure=measure, error=math.inf)  # the model does not know which kernels exist

    def rewrite(self, op, m, a, b, c, beta, alpha):
        padding = needed_padding(m, a.tensor, b.tensor)
        left = _padded(op, a, padding.m, padding.k)
        right = _padded(op, b, padding.k, padding.n)
        if c is None:
            product = op.matmul(left, right)
        else:
            rows = padding.m if c.rank >= 2 and not known(c.shape[-2] == 1) else 0
            columns = padding.n if c.rank >= 1 and not known(c.shape[-1] == 1) else 0
            bias = _padded(op, c, rows, columns)
            how = {name: value for name, value in (("beta", beta), ("alpha", alpha)) if value not in (None, 1)}
            product = getattr(op, m.root.op)(bias, left, right, **how)
        return _cut(op, product, m.root, padding)

    examples = [
        fires(lambda a, b: a @ b, "f32[6, 7]", "f32[7, 10]", settings=ALWAYS),
        fires(lambda a, b: torch.mm(a, b.t()), "bf16[8, 9]", "bf16[16, 9]", settings=ALWAYS),
        fires(lambda a, b: torch.mm(a.t(), b) * 2, "f16[8, 9]", "f16[8, 16]", settings=ALWAYS),
        fires(lambda a, b: torch.bmm(a, b), "f32[3, 6, 7]", "f32[3, 7, 10]", settings=ALWAYS),
        fires(lambda a: a[:, :1].expand(a.shape[0], 7).exp() @ torch.ones(7, 10), "f32[6, 8]", settings=ALWAYS,
              dynamic=True),
        fires(lambda a, b: a[:, :7] @ b, "f32[5, 8]", "f32[7, 9]", settings=ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b), "f32[10]", "f32[6, 7]", "f32[7, 10]", settings=ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), "f32[6, 1]", "f32[6, 7]", "f32[7, 10]",
              settings=ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a.t(), b, beta=0), torch.full((7, 10), math.nan), "f32[8, 7]",
              "f32[8, 10]", settings=ALWAYS),
        fires(lambda c, a, b: torch.baddbmm(c, a, b), "f32[3, 1, 10]", "f32[3, 6, 8]", "f32[3, 8, 10]",
              settings=ALWAYS),
        fires(lambda a, b: a @ b, torch.tensor([[math.inf, 1, 2], [math.nan, -0.0, 0]]), "f32[3, 5]",
              settings=ALWAYS),
        declines(lambda a, b: a @ b, "f32[6, 7]", "f32[7, 10]"),
        declines(lambda a, b: a @ b, "f32[6, 8]", "f32[8, 16]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "f64[6, 7]", "f64[7, 10]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "i64[6, 7]", "i64[7, 10]", settings=ALWAYS, dialects=("aten",)),
        declines(lambda a, b: a @ b, "f32[6, 7]", "f32[7]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "f32[6, 0]", "f32[0, 9]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "f32[6, 7]", "f32[7, 10]", settings=ALWAYS, dynamic=True,
                 because="not known to be aligned"),
    ]  # fmt: skip


@dataclass(frozen=True)
class PadMmPass(Pass):
    """Computes products whose sizes are not aligned for tensor cores on padded operands, or by a kernel that stores
    rows of any length, where that is quicker."""

    name = "pad_mm"
    always: bool = False
    """Pad every product that is not aligned, on every device: for tests."""
    measure: bool = True
    """Time the alternatives on the device; otherwise the cost model decides."""
    unaligned: bool = True
    """Also consider our own kernel, which stores rows of any length."""

    def rules(self) -> Sequence[Rule]:
        padded = PadMm(self.always, self.measure)
        return (UnalignedLinear(measure=self.measure), padded) if self.unaligned else (padded,)


def _is_broadcast(shape: Any, full: Any) -> bool:
    pairs = zip(reversed(shape), reversed(full))
    return all(known(size == 1) or known_equal(size, whole) for size, whole in pairs)


# ---- the rewrite ----


def _padded(op: Emitter, value: Value, rows: int, columns: int) -> Value:
    """The value with zeros below and to the right; an equal padding that is in the graph already is reused.

    A transposed matrix is transposed back, padded and transposed again, so that its innermost dim stays the same.
    """
    if not rows and not columns:
        return value
    if value.tensor is not None and value.rank >= 2 and not rows_lie_whole(value.tensor):
        swap = [*range(value.rank - 2), value.rank - 1, value.rank - 2]
        return op.permute(_padded(op, _transposed_back(op, value, swap), columns, rows), swap)
    pads = [0, columns, 0, rows] if rows else [0, columns]
    for user in value.node.users:
        call = op.program.call(user)
        if call is not None and call.op == "constant_pad_nd" and user < op.anchor and not call.mutates:
            if call.args == {"self": value.node, "pad": pads}:
                return Value(op.program, user)
    return op.constant_pad_nd(value, pads)


def _transposed_back(op: Emitter, value: Value, swap: list[int]) -> Value:
    call = value.call
    if call is not None and call.op == "permute" and list(call.args["dims"]) == swap:
        return Value(op.program, call.args["self"])
    return op.permute(value, swap)


def _cut(op: Emitter, product: Value, root: Value, padding: Padding) -> Value:
    if not padding.m and not padding.n:
        return product
    if padding.m:
        product = op.slice(product, root.rank - 2, 0, root.shape[-2])
    if padding.n:
        product = op.slice(product, root.rank - 1, 0, root.shape[-1])
    # users of the result may depend on its strides; for a pointwise user this copy is fused away
    return op.clone(product, memory_format=torch.contiguous_format)
