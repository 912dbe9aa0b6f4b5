"""`mul_softmax_pattern`, `div_softmax_pattern`: subtract the maximum of a softmax before they apply the scale.

A softmax of x * s computes x * s - max(x * s). Compilers may contract a product and a difference into one rounding, and
then an element may exceed the maximum: for large scores exp() of that excess overflows, which subtracting the maximum
was meant to prevent. (x - max(x)) * s has no such excess, and needs one product less to compute the maximum.

Why it is right, at the level of the whole softmax, for every s that is constant along its dim:

- s < 0 reverses the order: the maximum of x * s is at the minimum of x. The sign of a number is known, that of a tensor
  may follow from the operation that computed it; else both the maximum and the minimum are computed, and the sign
  selects one of them.
- Infinities, NaN: an infinite or NaN element gives the same zeros (-inf) or the same row of NaN (+inf, NaN, all -inf)
  either way; s = NaN, s = inf and x / 0 give rows of NaN either way, x / inf a uniform row.
- x * s may overflow, and a row with an infinite maximum is NaN. For |s| <= 1 it cannot; else the new maximum is NaN
  where s times it is not finite (0 * inf is NaN, 0 * finite adds nothing).
- x - max(x) may overflow to -inf, whose exp() is 0. That is right if exp() of minus |s| times the largest number of the
  dtype is far below the smallest number above 0. This can be checked where s is a number, but not where it is a tensor;
  and a log_softmax returns the difference. So these two cases need x in a narrower dtype than that of the softmax
  (half scores, float softmax), where nothing overflows.
- s = 0 is left alone: 0 * -inf is NaN.
- Where half scores are scaled before they are widened, eager rounds the product to half; the new form does not.

The gain with Inductor's kernels: for a number, one product less for each element in the loop that finds the maximum,
and contraction does no harm (Triton contracts, the C++ code generator is told not to). For a tensor whose sign is not
known, the loop computes a minimum in addition instead of one product less: on a CPU nothing is gained, and the rules
decline.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.facts import known
from ..ir.program import Program, Value
from ..ir.values.knowledge import knowledge
from ..match.matcher import equal
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule

f32, f64 = torch.float32, torch.float64


class _ScaledSoftmax(Rule, ABC):
    """scale(x) - max(scale(x)) -> scale(x - max(x)), inside a softmax"""

    exact = False
    mixed_dtypes = True
    CONTRACTS: ClassVar[tuple[str, ...]] = ("cuda", "xpu")
    """Devices for which the code generator contracts products and sums."""

    @abstractmethod
    def scaled(self, op: Any, x: Any, s: Any) -> Any: ...

    @abstractmethod
    def factor(self, number: float) -> float:
        """The factor by which the scale `number` multiplies."""

    def pattern(self, op, x: Tensor, s, wide, dim):
        scores = op.optional("to", self.scaled(op, x, s), dtype=wide)
        return op.sub(scores, op.amax(scores, dim, True))

    def check(self, m, x, s, dim):
        m.applies(m.root.known and x.known and x.is_float)
        wider = m.root.dtype.itemsize > x.dtype.itemsize
        m.require(
            _inside_softmax(m.program, m.root.node, dim), "the difference is used by something other than a softmax"
        )
        log = next((u for u in m.root.node.users if m.program.call(u).op == "sub"), None)
        m.require(wider or log is None, "a log_softmax returns the difference, which may overflow", at=log)
        if isinstance(s, (int, float)):
            m.require(s != 0 and math.isfinite(s), "the scale is {found}", found=s)
            least = 2 * -math.log(torch.finfo(m.root.dtype).tiny) / torch.finfo(m.root.dtype).max
            small = "the scale is so small that x - max(x) may overflow"
            m.require(wider or abs(self.factor(s)) > least, small, wanted=f"more than {least:.1g}", found=s)
            return
        m.applies(isinstance(s, Value) and s.is_tensor, "a symbolic scale")
        m.applies(_constant_along(s, x, dim), "the scale varies along the dim")
        tiny = "x - max(x) may overflow where the scale is tiny"
        m.require(wider, tiny, at=s, wanted=f"a wider dtype than {x.dtype}", found=m.root.dtype)
        m.require(
            knowledge(m.program).never_negative(s.node) or x.device.type in self.CONTRACTS,
            "the sign of the scale is not known, and nothing is gained by computing it",
            at=s,
        )

    def rewrite(self, op, m, x, s, dim):
        wide = m.root.dtype
        top = self._top(op, m, x, s, dim)
        if not isinstance(s, (int, float)) or abs(self.factor(s)) > 1:
            finite = op.mul(_as(op, self.scaled(op, top, s), wide), 0.0)
            top = op.add(_as(op, top, wide), finite)
        return self.scaled(op, op.sub(_as(op, x, wide), _as(op, top, wide)), s)

    def _top(self, op: Emitter, m: Match, x: Value, s: Any, dim: Any) -> Value:
        """The element of x whose scaled value is the largest along the dim."""
        if isinstance(s, (int, float)):
            return op.amax(x, dim, True) if s > 0 else op.amin(x, dim, True)
        if knowledge(m.program).never_negative(s.node):
            return op.amax(x, dim, True)
        return op.where(op.ge(s, 0), op.amax(x, dim, True), op.amin(x, dim, True))


def by_hand(scores: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """A softmax as decompositions write it."""
    raised = (scores - scores.amax(dim, keepdim=True)).exp()
    return raised / raised.sum(dim, keepdim=True)


def log_by_hand(scores: torch.Tensor) -> torch.Tensor:
    below = scores - scores.amax(-1, keepdim=True)
    return below - below.exp().sum(-1, keepdim=True).log()


INFINITE = torch.tensor([[1.0, math.inf, 2.0], [-math.inf, 0.0, -0.0], [-math.inf] * 3, [math.nan, 1.0, 2.0]])
HUGE = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3.1e38, -3.2e38], [3e38, 2e38, 3e38], [0.0, -0.0, 1e-45]])
SCALES = torch.tensor([[0.0], [-0.0], [math.inf], [math.nan]])


class MulSoftmaxPattern(_ScaledSoftmax):
    """x * s - max(x * s) -> (x - max(x)) * s, inside a softmax, s constant along its dim; up to rounding"""

    def scaled(self, op, x, s):
        return op.mul(x, s)

    def factor(self, number):
        return number

    examples = [
        fires(lambda x: by_hand(x * 0.125), "f32[4, 8]"),
        fires(lambda x: by_hand(-0.5 * x, 0), "f32[4, 8]"),
        fires(lambda x: by_hand(x * 1.5), "f32[4, 8]", dynamic=True),
        fires(lambda x: by_hand((x * 0.125).float()).half(), "f16[4, 8]"),
        fires(lambda x: by_hand((x * 3).double(), 1).float(), "f32[2, 4, 8]"),
        fires(lambda x: log_by_hand((x * 0.125).float()), "f16[4, 8]"),
        fires(lambda x, s: by_hand((x * s.exp()).float()).bfloat16(), "bf16[4, 8]", "bf16[]"),
        fires(lambda x, s: by_hand((s.sigmoid() * x).float()).half(), "f16[4, 8]", "f16[4, 1]"),
        *(fires(lambda x: (by_hand(x * 0.25), by_hand(x * -0.25)), x) for x in (INFINITE, HUGE)),
        *(fires(lambda x: (by_hand(x * 2.0), by_hand(x * -2.0)), x) for x in (INFINITE, HUGE)),
        fires(lambda x, s: by_hand((x * s.abs()).double()), HUGE, SCALES),
        fires(lambda x, s: by_hand((x * s.abs()).double()), INFINITE, torch.tensor([[2.0], [0.0], [1.0], [1e30]])),
        declines(lambda x: by_hand(x * 1e-37), HUGE, because="so small"),
        declines(lambda x: by_hand(x * 0.0), INFINITE, because="the scale is"),
        declines(lambda x: by_hand(x * math.inf), "f32[4, 8]", because="the scale is"),
        declines(lambda x: by_hand(x * math.nan), "f32[4, 8]"),
        declines(lambda x: log_by_hand(x * 0.125), HUGE, because="log_softmax"),
        declines(lambda x, s: by_hand((x * s).float()), "f16[4, 8]", "f16[]", because="sign"),
        declines(lambda x, s: by_hand(x * s.abs()), "f32[4, 8]", "f32[]", because="tiny"),
        declines(lambda x, s: by_hand(x * s.abs(), 0), "f32[]", "f32[]", because="tiny"),
        declines(lambda x, s: by_hand((x * s.abs()).float()), "f16[4, 8]", "f16[8]"),
        declines(lambda x: (y := x * 0.125, by_hand(y)), "f32[4, 8]", because="used outside"),
        declines(lambda x: (y := x * 0.125) - y.amax(-1, keepdim=True), "f32[4, 8]", because="something other"),
        declines(lambda x: by_hand(x), "f32[4, 8]"),
    ]  # fmt: skip


class DivSoftmaxPattern(_ScaledSoftmax):
    """x / s - max(x / s) -> (x - max(x)) / s, inside a softmax, s constant along its dim; up to rounding"""

    def scaled(self, op, x, s):
        return op.div(x, s)

    def factor(self, number):
        return 1 / number

    examples = [
        fires(lambda x: by_hand(x / 8), "f32[4, 8]"),
        fires(lambda x: by_hand(x / 0.7), "f32[4, 8]", dynamic=True),
        fires(lambda x: by_hand((x / math.sqrt(64)).float()).half(), "f16[4, 8]"),
        fires(lambda x: log_by_hand((x / -0.7).float()).bfloat16(), "bf16[4, 8]"),
        fires(lambda x, s: by_hand((x / s.exp()).float()).half(), "f16[4, 8]", "f16[]"),
        *(fires(lambda x: (by_hand(x / 4.0), by_hand(x / -4.0)), x) for x in (INFINITE, HUGE)),
        *(fires(lambda x: (by_hand(x / 0.5), by_hand(x / -0.5)), x) for x in (INFINITE, HUGE)),
        fires(lambda x, s: by_hand((x / s.abs()).double()), HUGE, SCALES),
        fires(lambda x, s: by_hand((x / s.abs()).double()), INFINITE, torch.tensor([[2.0], [math.inf], [1.0], [1e30]])),
        declines(lambda x: by_hand(x / math.inf), "f32[4, 8]", because="the scale is"),
        declines(lambda x: by_hand(x / 1e37), HUGE, because="so small"),
        declines(lambda x: by_hand(4 / x), "f32[4, 8]"),
        declines(lambda x: by_hand(torch.div(x, 4, rounding_mode="floor")), "f32[4, 8]"),
        declines(lambda x: F.softmax(x / 8, -1), "f32[4, 8]"),  # one operation: nothing is between scale and maximum
    ]  # fmt: skip


def _as(op: Emitter, value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else op.to(value, dtype=dtype)


def _constant_along(s: Value, x: Value, dim: Any) -> bool:
    """Is the scale broadcast along every dim of the softmax?"""
    if s.rank > x.rank:
        return False
    # a scalar has the dims 0 and -1, as if it were a tensor of one element
    aligned = [1] * (max(x.rank, 1) - s.rank) + list(s.shape)
    return all(known(aligned[d] == 1) for d in dim)


def _inside_softmax(program: Program, below: Node, dim: Any) -> bool:
    """Is x - max(x) used for a softmax or a log_softmax over that dim and nothing else? A row that is NaN in one place
    is then NaN in all."""
    raised = [u for u in below.users if _op(program, u) == "exp"]
    if len(raised) != 1:
        return False
    totals = [u for u in raised[0].users if _sums(program, u, dim)]
    logs = [u for total in totals for u in total.users if _op(program, u) == "log"]

    def shares(user: Node, op: str, by: list[Node]) -> bool:
        call = program.call(user)
        return call is not None and call.op == op and set(call.args) == {"self", "other"} and call.args["other"] in by

    return (
        bool(totals)
        and all(u in totals or shares(u, "div", totals) for u in raised[0].users)
        and all(u in raised or shares(u, "sub", logs) for u in below.users)
    )


def _op(program: Program, node: Node) -> str:
    call = program.call(node)
    return call.op if call is not None and not call.mutates else ""


def _sums(program: Program, node: Node, dim: Any) -> bool:
    call = program.call(node)
    if call is None or call.op != "sum" or call.args.get("keepdim") is not True or "dtype" in call.args:
        return False
    return equal(call.args.get("dim"), dim)
