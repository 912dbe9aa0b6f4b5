"""Second phase, the scores: how each term changes the plan. One rule for each kind of term."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..ir.dtypes import rounded
from ..ir.program import Value
from ..ir.values.choices import choice, never_infinite
from ..rewrite.refusal import Refused
from .blame import blaming
from .draft import Draft
from .layout import aligned, padded, reshaped_along
from .masks import MASKS, is_number, negation, where_one
from .score_plan import Gate, GateMask, MaskAsBias, PlannedFactor, ScorePlan
from .sinks import refuse_beside_sink, sink_column
from .terms import Bias, Cast, CutOff, Factor, Mask, Scale, ScoreType, Shift, Sink, Term, View

LOST_IN_FLOAT32 = -1e8
"""A number so low that a score added to it is lost to rounding in float32."""
STILL_NEGLIGIBLE = -1e3
"""A negligible fill that is scaled, together with the other scores, may become as high as this."""


def plan_scores(draft: Draft, terms: Sequence[Term], product_dtype: torch.dtype, lowest_score: float) -> ScorePlan:
    """The plan after all terms have been applied, one after the other."""
    plan = ScorePlan(product_dtype, lowest_score)
    for term in terms:
        plan = followed(term, plan, draft)
    if plan.varies_after_shift:
        raise Refused("scores that were shifted are multiplied by what varies with the key")
    return plan


def followed(term: Term, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """The plan after one more term."""
    with blaming(term.node):
        after = apply(term, plan, draft)
    return replace(after, trail=(*after.trail, (term, plan)))


@functools.singledispatch
def apply(term: Term, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """The plan after a term; raises Refused where no kernel computes such scores."""
    raise TypeError(f"no rule for {type(term).__name__} of scores")


@apply.register
def _cast(term: Cast, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """Where the scores are rounded to a narrower dtype, biases, fills and the sink are rounded to it as well."""
    if torch.finfo(term.dtype).eps <= torch.finfo(term.before.dtype).eps:
        return plan
    bias, floor, sink = (
        v if v is None or v.dtype == term.dtype else draft.to(v, dtype=term.dtype)
        for v in (plan.bias, plan.floor, plan.sink)
    )
    return replace(plan, bias=bias, floor=floor, sink=sink, fills=_each(plan, lambda f: rounded(f, term.dtype)))


@apply.register
def _scale(term: Scale, plan: ScorePlan, draft: Draft) -> ScorePlan:
    number, scale = term.number, plan.scale * term.number
    if number < 0 and plan.keep is not None:
        raise Refused("masked scores are multiplied by a negative number")
    if not math.isfinite(scale) or scale == 0:
        raise Refused(f"a scale of {scale}")
    if number == 1:
        return plan
    fills = _each(plan, lambda f: rounded(f * number, term.before.dtype))
    if any(f > STILL_NEGLIGIBLE for f in fills):
        raise Refused("masked scores are scaled until they may count beside others")
    bias, floor, sink = (None if v is None else draft.mul(v, number) for v in (plan.bias, plan.floor, plan.sink))
    return replace(plan, scale=scale, fills=fills, bias=bias, floor=floor, sink=sink)


@apply.register
def _factor(term: Factor, plan: ScorePlan, draft: Draft) -> ScorePlan:
    refuse_beside_sink(plan.sink)
    if plan.keep is not None:
        plan = followed(MaskAsBias(term.before, term.node), plan, draft)
    given = value = draft.of(term.factor)
    if term.divide:
        value = draft.call(operator.truediv, 1, given) if is_number(term.factor) else draft.rdiv(given, 1)
    by = None if term.divide else choice(draft.program.origin, term.factor)
    in_order = value if value.rank in (None, 0) else aligned(draft, value, term.before.layout)
    factor = PlannedFactor(term, len(plan.steps), in_order)
    bias = None if plan.bias is None else draft.mul(plan.bias, value)
    gates = plan.gates
    if by is not None and by.is_mask:
        gates = (*gates, Gate(by, factor, term.before.layout, plan.bias, bias))
    return replace(plan, factors=(*plan.factors, factor), bias=bias, gates=gates)


@apply.register
def _mask_as_bias(term: MaskAsBias, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """Masked scores are multiplied by a tensor that is not known at compile time: the fills are scaled as well, and may
    be anything afterwards. They become part of the bias instead, since the scores that they replace are lost to
    rounding when numbers that low are added."""
    if plan.fills_count or any(f > LOST_IN_FLOAT32 for f in plan.fills):
        raise Refused("masked scores are multiplied by a tensor, after which they may count beside others")
    assert plan.keep is not None
    dtype = term.before.dtype
    filled: Any = plan.floor if plan.floor is not None else min(plan.fills)
    rest = draft.full([], 0.0, dtype=dtype, device=plan.keep.device) if plan.bias is None else plan.bias
    rest = _able_to_hold(draft, rest, min(plan.fills), dtype)
    bias = draft.where(plan.keep, rest, filled)
    return replace(plan, bias=bias, keep=None, floor=None, fills=frozenset())


@apply.register
def _bias(term: Bias, plan: ScorePlan, draft: Draft) -> ScorePlan:
    refuse_beside_sink(plan.sink)
    if (gate := _closed_gate(term, plan, draft)) is not None:
        factors = tuple(f for f in plan.factors if f is not gate.gate.factor)
        return followed(gate, replace(plan, factors=factors), draft)
    value, dtype, times = draft.of(term.bias), term.before.dtype, term.times
    if not value.is_float or value.rank == 0:  # these do not widen the scores
        value = value if value.dtype == dtype else draft.to(value, dtype=dtype)
    value = value if times == 1 else draft.neg(value) if times == -1 else draft.mul(value, times)
    floor = plan.floor
    if plan.fills - {-math.inf} or (plan.fills and not never_infinite(draft.program, value.node)):
        fill = min(plan.fills)  # -inf becomes NaN where infinity is added
        low: tuple[Any, Any] = (floor, value)
        floor = draft.add(*(low if floor is not None else (_able_to_hold(draft, value, fill, dtype), fill)))
    return replace(plan, floor=floor, bias=value if plan.bias is None else draft.add(plan.bias, value))


def _closed_gate(term: Bias, plan: ScorePlan, draft: Draft) -> GateMask | None:
    """s * m + (m - 1) * 1e9 -> where(m, s, -1e9), if m is proved to hold zeros and ones"""
    program, value = draft.program.origin, draft.of(term.bias)
    added = choice(program, term.bias) if plan.gates and plan.keep is None and value.rank else None
    for gate in plan.gates if added is not None else ():
        seen_since = gate.factor.steps != len(plan.steps) or gate.layout != term.before.layout
        if seen_since or added is None or not gate.by.same_places(program, added):
            continue
        inside, cut = (added.high, added.low) if gate.by.high == 1 else (added.low, added.high)
        cut = rounded(cut * term.times, torch.promote_types(term.before.dtype, value.dtype))
        if inside == 0 and cut <= MASKS:
            return GateMask(term.before, term.node, gate, where_one(draft, gate.factor.term.factor), cut)
    return None


@apply.register
def _gate_mask(term: GateMask, plan: ScorePlan, draft: Draft) -> ScorePlan:
    _refuse_shifted(term.fill, term.before, plan)
    gate, bias, floor = term.gate, plan.bias, plan.floor
    if bias is gate.bias_after:
        bias = gate.bias_before
    elif term.fill != -math.inf and bias is not None:  # the bias added in between applies to masked scores too
        floor = draft.add(_able_to_hold(draft, bias, term.fill, term.before.dtype), term.fill)
    return replace(plan, gates=(), bias=bias, floor=floor, keep=term.keep, fills=frozenset({term.fill}))


@apply.register
def _shift(term: Shift, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """The softmax stays the same, unless a sink is joined to the scores later."""
    return plan


@apply.register
def _cut_off(term: CutOff, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """It changes -inf only, and so it affects only the bias and the fills."""
    refuse_beside_sink(plan.sink)
    _refuse_undefined(plan)

    def raised(value: Value | None) -> Value | None:
        if value is None or never_infinite(draft.program, value.node):
            return value
        return draft.clamp(_able_to_hold(draft, value, term.lowest, term.before.dtype), min=term.lowest)

    bias, floor = raised(plan.bias), raised(plan.floor)
    return replace(plan, fills=_each(plan, lambda f: max(f, term.lowest)), bias=bias, floor=floor)


@apply.register
def _mask(term: Mask, plan: ScorePlan, draft: Draft) -> ScorePlan:
    refuse_beside_sink(plan.sink)
    if plan.cut_by_sum:
        raise Refused("scores are masked again after -inf was added to them")
    if term.fill != -math.inf:
        _refuse_undefined(plan)
    _refuse_shifted(term.fill, term.before, plan)
    plain, negated = negation(draft.program.origin, term.mask)
    keep = draft.logical_not(plain) if term.masks_out ^ negated else draft.of(plain)
    if plan.keep is None:
        return replace(plan, keep=keep, fills=frozenset({term.fill}))
    floor, dtype = plan.floor, term.before.dtype
    if floor is not None or plan.fills != {term.fill}:  # the later fill covers the earlier
        earlier = floor if floor is not None else draft.full([], min(plan.fills), dtype=dtype)
        floor = draft.where(keep, _able_to_hold(draft, earlier, term.fill, dtype), term.fill)
    return replace(plan, floor=floor, fills=plan.fills | {term.fill}, keep=draft.logical_and(plan.keep, keep))


@apply.register
def _sink(term: Sink, plan: ScorePlan, draft: Draft) -> ScorePlan:
    refuse_beside_sink(plan.sink)
    if plan.shifted:
        raise Refused("a sink stands beside scores that were shifted")
    dtype = torch.promote_types(term.before.dtype, draft.of(term.joined.sink).dtype)
    return replace(plan, sink=sink_column(draft, draft.program.origin, term.joined, dtype))


@apply.register
def _view(term: View, plan: ScorePlan, draft: Draft) -> ScorePlan:
    """Bias, mask, fills and sink get the same views as the scores, without being expanded where that can be avoided."""

    def moved(value: Value | None) -> Value | None:
        if value is None:
            return None
        if term.call.op == "permute":
            return draft.permute(padded(draft, value, len(term.before.shape)), term.call.args["dims"])
        return reshaped_along(draft, value, term.before.shape, term.shape)

    bias, keep, floor, sink = map(moved, (plan.bias, plan.keep, plan.floor, plan.sink))
    steps = plan.steps if term.step is None else (*plan.steps, term.step)
    return replace(plan, steps=steps, bias=bias, keep=keep, floor=floor, sink=sink)


# ---- helpers of several rules ----


def _each(plan: ScorePlan, change: Any) -> frozenset[float]:
    return frozenset(change(f) for f in plan.fills)


def _refuse_undefined(plan: ScorePlan) -> None:
    if plan.undefined:
        raise Refused("scores that were shifted by -inf are raised again")


def _refuse_shifted(fill: float, scores: ScoreType, plan: ScorePlan) -> None:
    if plan.shifted and plan.may_count(fill, scores):
        raise Refused(f"scores that were shifted are filled with {fill}, which may count beside others")


def _able_to_hold(draft: Draft, value: Value, number: float, dtype: torch.dtype) -> Value:
    """The value, cast to `dtype` if `number` would overflow to -inf in its own dtype. Scores may have been cast to a
    wider dtype after the value was added to them, which leaves the value narrow."""
    overflows = math.isfinite(number) and math.isinf(rounded(number, value.dtype))
    return draft.to(value, dtype=dtype) if overflows else value
