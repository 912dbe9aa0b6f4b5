"""relu_nan_to_num: rewrites `nan_to_num` beside `relu` to the cheapest form that is exact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.calls import Call
from ..ir.dtypes import rounded
from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..match.pattern import Tensor
from ..rewrite.edits import Respell
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from ..rewrite.spelling import Spelling
from ..rules.noop_arithmetic import SPECIAL, Idempotent
from ..rules.noop_views import Noop

NAN, INFINITY = math.nan, math.inf
MANY = SPECIAL.repeat(9)
"""For examples: long enough that vectorised kernels process several elements at once."""


@dataclass(frozen=True)
class Replaced:
    """The values that `nan_to_num` substitutes for NaN and the infinities, rounded to its dtype."""

    nan: float
    posinf: float
    neginf: float

    @staticmethod
    def by(m: Match, dtype: torch.dtype | None, nan: Any, posinf: Any, neginf: Any) -> Replaced:
        """The values that a call substitutes. The defaults are 0 and the largest and smallest finite values; a number
        too large for the dtype becomes infinite."""
        m.require(dtype is not None, "shape and dtype are not known")
        m.applies(dtype is not None and dtype.is_floating_point, "the dtype has neither NaN nor infinity")
        values = (nan, posinf, neginf)
        m.require(all(v is None or type(v) in (int, float) for v in values), "a replacement value is not a constant")
        assert dtype is not None
        limits = torch.finfo(dtype)
        numbers = [d if v is None else float(v) for v, d in zip(values, (0.0, limits.max, limits.min))]
        return Replaced(*(rounded(number, dtype) for number in numbers))

    def of(self, value: float) -> float:
        if math.isnan(value):
            return self.nan
        return value if math.isfinite(value) else self.posinf if value > 0 else self.neginf

    def after(self, first: Replaced) -> Replaced:
        """The effect of `first` followed by this one."""
        return Replaced(self.of(first.nan), self.of(first.posinf), self.of(first.neginf))

    def write(self, op: Emitter, x: Any, dtype: torch.dtype, after_relu: bool = False) -> Any:
        """`nan_to_num(x)` with these values; defaults are left out, as is `neginf` after a relu."""
        limits = torch.finfo(dtype)
        defaults = {"nan": 0.0, "posinf": limits.max, "neginf": self.neginf if after_relu else limits.min}
        given = {name: getattr(self, name) for name, value in defaults.items() if not _same(getattr(self, name), value)}
        return op.nan_to_num(x, **given)


def _same(left: float, right: float) -> bool:
    return left == right and math.copysign(1, left) == math.copysign(1, right)


def _is_negative_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


class ReluOfNanToNum(Rule):
    """relu(nan_to_num(x, nan, posinf, neginf)) -> nan_to_num(relu(x), relu(nan), relu(posinf))

    Values and gradients are the same: where x is NaN or infinite the gradient is 0 either way. Autograd saves one value
    less, because the backward of both operations needs only the result of relu.
    """

    def pattern(self, op, x: Tensor, nan, posinf, neginf):
        return op.relu(op.nan_to_num(x, nan, posinf, neginf))

    def check(self, m, x, nan, posinf, neginf):
        self._replaced(m, x, nan, posinf, neginf)

    def rewrite(self, op, m, x, nan, posinf, neginf):
        return self._replaced(m, x, nan, posinf, neginf).write(op, op.relu(x), x.dtype, after_relu=True)

    def _replaced(self, m: Match, x: Any, nan: Any, posinf: Any, neginf: Any) -> Replaced:
        inner = Replaced.by(m, x.dtype, nan, posinf, neginf)
        values = (inner.nan, inner.posinf, inner.neginf)
        at = m.nodes[1]
        m.require(not any(map(_is_negative_zero, values)), "relu may or may not keep the sign of -0.0", at=at)
        positive = "-inf becomes {found}, but would become 0 if relu came first"
        m.require(inner.neginf <= 0, positive, at=at, wanted="at most 0", found=inner.neginf)
        clamped = [v if math.isnan(v) else max(v, 0.0) for v in values]
        return Replaced(*clamped)

    examples = [
        fires(lambda x: torch.relu(torch.nan_to_num(x)), SPECIAL),
        fires(lambda x: x.nan_to_num().relu(), MANY),
        fires(lambda x: F.relu(x.nan_to_num(nan=2.5, posinf=7, neginf=-3)), MANY),
        fires(lambda x: torch.relu(input=torch.nan_to_num(input=x, nan=-1.0)), MANY),
        fires(lambda x: x.nan_to_num(NAN, INFINITY, -INFINITY).relu(), MANY),
        fires(lambda x: x.nan_to_num(posinf=1e30).relu(), MANY.half()),  # no half is as large: it is infinite
        fires(lambda x: x.nan_to_num(1.0, 2.0, 0.0).relu(), MANY.double()),
        fires(lambda x: x.nan_to_num().relu(), MANY.bfloat16()),
        fires(lambda x: x.nan_to_num().relu(), "f32[4, 8]", dynamic=True),
        fires(lambda x: x.nan_to_num().relu(), "f32[0, 8]"),
        fires(lambda x: x.t().nan_to_num().relu(), "f32[]"),
        fires(lambda x: x.nan_to_num().relu().nan_to_num(posinf=1.0), MANY),
        declines(lambda x: x.nan_to_num(neginf=1.0).relu(), MANY, because="-inf becomes 1.0"),
        declines(lambda x: x.nan_to_num(nan=-0.0).relu(), MANY, because="-0.0"),
        declines(lambda x: (y := x.nan_to_num(), y.relu()), "f32[4]", because="outside the pattern"),
        declines(lambda x: x.nan_to_num().relu(), "i64[4]"),
        declines(lambda x: x.nan_to_num().relu_(), "f32[4]", dialects=["torch"]),
        declines(lambda x: (y := x.nan_to_num(), x.add_(1), y.relu())[-1], "f32[4]", dialects=["torch"],
                 because="in between"),
    ]  # fmt: skip


class NanToNumTwice(Rule):
    """nan_to_num(nan_to_num(x)) -> nan_to_num(x), with the values by which both together
    replace NaN and the infinities"""

    def pattern(self, op, x: Tensor, nan, posinf, neginf, then_nan, then_posinf, then_neginf):
        return op.nan_to_num(op.nan_to_num(x, nan, posinf, neginf), then_nan, then_posinf, then_neginf)

    def check(self, m, x):
        self._both(m, x.dtype)

    def rewrite(self, op, m, x):
        return self._both(m, x.dtype).write(op, x, x.dtype)

    def _both(self, m: Match, dtype: torch.dtype | None) -> Replaced:
        first = Replaced.by(m, dtype, m["nan"], m["posinf"], m["neginf"])
        return Replaced.by(m, dtype, m["then_nan"], m["then_posinf"], m["then_neginf"]).after(first)

    examples = [
        fires(lambda x: x.nan_to_num().nan_to_num(), SPECIAL),
        fires(lambda x: x.nan_to_num(NAN, INFINITY, 3.0).nan_to_num(1.0, 2.0), MANY),
        fires(lambda x: torch.nan_to_num(x, nan=INFINITY).nan_to_num(posinf=5.0), MANY),
        declines(lambda x: (y := x.nan_to_num(), y.nan_to_num()), "f32[4]", because="outside the pattern"),
        declines(lambda x: x.nan_to_num().nan_to_num(), "i64[4]"),
    ]


class NoNanInIntegers(Noop):
    """nan_to_num(x) -> x, where x is an integer"""

    def pattern(self, op, x: Tensor, nan, posinf, neginf):
        return op.nan_to_num(x, nan, posinf, neginf)

    def check(self, m, x):
        m.applies(x.known and not x.is_float and not x.dtype.is_complex, "x is not known to be an integer")
        super().check(m, x)

    examples = [
        fires(lambda x: x.relu().nan_to_num() + 1, "i64[4]"),
        fires(lambda x: x.nan_to_num(nan=3.0).relu(), "i32[4]"),
        declines(lambda x: x.nan_to_num() + 1, "f32[4]"),
        declines(lambda x: x.nan_to_num(), "i64[4]", because="leaves the graph"),
        declines(lambda x: x.nan_to_num().add_(1), "i64[4]", dialects=["torch"], because="written"),
    ]


class NanToNumOfRelu(Rule):
    """nan_to_num(relu(x), nan=n, posinf=p) -> clamp(x, 0, p) if n is NaN, where(x >= 0, clamp(x, max=p), 0) if n is 0

    p is the largest finite value, to which clamp reduces inf, or inf itself, which needs no clamp. x >= 0 is false for
    NaN, so this one comparison replaces the three that nan_to_num makes on the result of relu. Torch's relu keeps -0.0
    on a CPU and turns it into 0.0 on a GPU, where the comparison is x > 0.

    The rule declines where a gradient is needed: the gradient of relu is 1 at NaN and at inf, that of clamp is 1 at 0,
    and that of the pair is 0 at these points.
    """

    without_gradient = True

    def pattern(self, op, x: Tensor, nan, posinf, neginf):
        return op.nan_to_num(op.relu(x), nan, posinf, neginf)

    def check(self, m, x, nan, posinf, neginf):
        values = Replaced.by(m, x.dtype, nan, posinf, neginf)
        m.applies(
            not any(_is_nan_to_num(m.program, u) for u in m.root.node.users),
            "it is first merged with the nan_to_num that follows",
        )
        no_such = "NaN would have to become {found}: it can only stay NaN or become 0"
        m.require(math.isnan(values.nan) or _same(values.nan, 0.0), no_such, wanted="NaN or 0", found=values.nan)
        largest = torch.finfo(x.dtype).max
        m.require(
            values.posinf in (INFINITY, largest),
            "no single operation replaces only inf, by {found}", wanted=f"inf or {largest}", found=values.posinf,
        )  # fmt: skip

    def rewrite(self, op, m, x, nan, posinf, neginf):
        values = Replaced.by(m, x.dtype, nan, posinf, neginf)
        is_clamped = values.posinf != INFINITY
        if math.isnan(values.nan):
            return op.clamp(x, min=0, max=values.posinf) if is_clamped else op.relu(x)
        on_gpu = x.tensor.device.type == "cuda"
        mask = op.gt(x, 0) if on_gpu else op.ge(x, 0)
        return op.where(mask, op.clamp(x, max=values.posinf) if is_clamped else x, 0.0)

    examples = [
        fires(lambda x: torch.nan_to_num(torch.relu(x)), MANY, dialects=["torch"]),
        fires(lambda x: F.relu(x).nan_to_num(nan=0.0), SPECIAL.half(), dialects=["torch"]),
        fires(lambda x: x.relu().nan_to_num(0.0, 1e300), MANY.bfloat16(), dialects=["torch"]),
        fires(lambda x: x.t().relu().nan_to_num(), "f32[3, 5]", dialects=["torch"], dynamic=True),
        fires(lambda x: x.relu().nan_to_num(), "f64[]", dialects=["torch"]),
        fires(lambda x: x.relu().nan_to_num(nan=NAN, posinf=INFINITY), MANY, dialects=["torch"]),
        fires(lambda x: torch.nan_to_num(F.relu(x), NAN), MANY, dialects=["torch"]),
        fires(lambda x: torch.nan_to_num(F.relu(x), NAN), SPECIAL.half(), dialects=["torch"]),
        fires(lambda x: torch.nan_to_num(F.relu(x), NAN), MANY.bfloat16(), dialects=["torch"]),
        fires(lambda x: x.relu().nan_to_num(NAN, 1e300), MANY.half(), dialects=["torch"]),
        fires(lambda x: x.relu().nan_to_num(NAN), "f64[4]", dialects=["torch"], dynamic=True),
        declines(lambda x: x.relu().nan_to_num(1.0), MANY, because="NaN would have to become 1.0"),
        declines(lambda x: x.relu().nan_to_num(-0.0), MANY, because="NaN would have to become -0.0"),
        declines(lambda x: x.relu().nan_to_num(NAN, 3.0), MANY, because="no single operation"),
        declines(lambda x: x.relu().nan_to_num(NAN), MANY, dialects=["aten"], because="gradient"),
        declines(lambda x: x.relu().nan_to_num(), torch.ones(4, requires_grad=True), because="gradient"),
        declines(lambda x: (y := x.relu(), y.nan_to_num(NAN)), "f32[4]", because="outside the pattern"),
    ]


class StabilizeRelu(Rule):
    """relu(x) -> nan_to_num(relu(x), posinf=inf), with the option stabilize_relu; NaN becomes 0

    `x.relu_()` becomes a `copy_` into x. The copied values are in new memory, where autograd may save them for the
    backward.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for node in list(program.graph.nodes) if program.options.stabilize_relu else ():
            call = program.call(node)
            if call is None or call.op not in ("relu", "relu_"):
                continue
            known = tensor_fact(node)
            if known is None or known.dtype.is_floating_point:
                yield Match.at(program, node, call=call)

    def check(self, m, call):
        guard = _guard(m.program, m.root.node, call)
        m.require(guard is None, "a nan_to_num is next to it already", at=guard)

    def rewrite(self, op, m, call):
        x = call.args["self"]
        stable = op.nan_to_num(op.relu(x), posinf=INFINITY)
        if call.op == "relu":
            return stable
        return Respell(m.root.node, Spelling("call_method", "copy_", (x, stable.node), {}))

    examples = [
        fires(lambda x: x.relu() + 1, "f32[4, 8]", options={"stabilize_relu": True}),
        fires(lambda x: x.relu(), MANY[MANY.isfinite()], options={"stabilize_relu": True}),
        fires(lambda x: F.relu(x * 2, inplace=True) + 1, "f32[4, 8]", options={"stabilize_relu": True}),
        fires(lambda x: (x.relu_(), x[0] + 1)[1], "f32[4, 8]", options={"stabilize_relu": True}),
        fires(lambda x: (y := x.relu(), y.nan_to_num()), "f32[4, 8]", options={"stabilize_relu": True}),
        fires(lambda x: x.relu().nan_to_num(nan=NAN), "f32[4]", options={"stabilize_relu": True}, dialects=["torch"]),
        declines(lambda x: x.relu().nan_to_num(1.0), "f32[4]", options={"stabilize_relu": True},
                 because="next to it already"),
        declines(lambda x: (y := x.nan_to_num(), y.relu()), "f32[4]", options={"stabilize_relu": True},
                 because="next to it already"),
        declines(lambda x: x.relu(), "i64[4]", options={"stabilize_relu": True}),
        declines(lambda x: x.relu(), "f32[4, 8]"),
    ]  # fmt: skip


def _guard(program: Program, relu: Node, call: Call) -> Node | None:
    """The nan_to_num before the relu, or, if all users of the relu replace NaN, the first of these; else None."""
    before = call.args["self"]
    if isinstance(before, Node) and _replaces_nan(program, before):
        return before
    if call.mutates:
        return None  # the memory that it wrote may be read through aliases
    readers = list(relu.users)
    return readers[0] if readers and all(_replaces_nan(program, user) for user in readers) else None


def _is_nan_to_num(program: Program, node: Node) -> bool:
    call = program.call(node)
    return call is not None and call.op == "nan_to_num"


def _replaces_nan(program: Program, node: Node) -> bool:
    call = program.call(node)
    if call is None or call.op != "nan_to_num":
        return False
    nan = call.get("nan")
    return nan is None or type(nan) in (int, float) and not math.isnan(nan)


RULES: Sequence[Rule] = (
    StabilizeRelu(),  # first: the other rules may remove a relu
    ReluOfNanToNum(),
    NanToNumTwice(),
    NoNanInIntegers(),
    NanToNumOfRelu(),
    Idempotent(),
)


@dataclass(frozen=True)
class ReluNanToNum(Pass):
    """Rewrites `nan_to_num` next to `relu` to the cheapest form with the same values and gradients. With the option
    `stabilize_relu`, it also replaces NaN after every relu by 0, which changes results on NaN.

    Where no gradient is needed, `nan_to_num(relu(x))` selects between 0 and x, clamped to the largest finite number.
    Otherwise it stays two operations, which a code generator fuses into one kernel. The gradient of a stabilized relu
    is 0 at NaN and at inf, as that of `nan_to_num` is.
    """

    name: ClassVar[str] = "relu_nan_to_num"

    def rules(self) -> Sequence[Rule]:
        return RULES
