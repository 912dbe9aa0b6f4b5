"""Second phase, the probabilities: how each term between the softmax and the product with the values is computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import known
from ..ir.program import Value
from ..ir.values.choices import choice
from ..ir.values.equality import same_value
from ..rewrite.refusal import Refused
from .blame import blaming
from .draft import Draft
from .layout import BatchStep, aligned
from .masks import negation
from .score_plan import ScorePlan
from .sinks import drops_sink
from .terms import Cast, Dropout, DropSink, Factor, NanToZero, Scale, Term, View, ZeroWhere


@dataclass(frozen=True)
class ProbabilityPlan:
    """What is done to the softmax of the scores, by the terms that were applied so far."""

    scores: ScorePlan
    may_draw: bool
    """A kernel may draw other numbers for its dropout than eager."""
    dropout: float = 0.0
    empty_rows_are_zero: bool = False
    """Fully masked queries give zero."""
    sink_is_dropped: bool = False
    nan_is_zero: bool = False
    factor: float = 1.0
    steps: Sequence[BatchStep] = ()
    """How views have changed the batch axes."""
    factors: Sequence[tuple[int, Value]] = ()
    """Tensors with the axes (batch, queries, keys), each with the number of steps before it: they are applied to the
    result or to the values."""


def plan_probabilities(draft: Draft, terms: Sequence[Term], scores: ScorePlan, may_draw: bool) -> ProbabilityPlan:
    """The plan after all terms have been applied, one after the other."""
    plan = ProbabilityPlan(scores, may_draw)
    for term in terms:
        with blaming(term.node):
            plan = apply(term, plan, draft)
    if scores.sink is not None and not plan.sink_is_dropped:
        raise Refused("the sink counts as a value")
    return plan


@functools.singledispatch
def apply(term: Term, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    raise TypeError(f"no rule for {type(term).__name__} of probabilities")


@apply.register
def _cast(term: Cast, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    """Casts are dropped: kernels choose the precision of the probabilities themselves."""
    return plan


@apply.register
def _view(term: View, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    return plan if term.step is None else replace(plan, steps=(*plan.steps, term.step))


@apply.register
def _drop_sink(term: DropSink, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    if plan.scores.sink is None or plan.sink_is_dropped:
        raise Refused("a part of the probabilities is taken")
    if not drops_sink(term.call, term.old, term.new, term.before.layout.key, plan.scores.sink_is_first):
        raise Refused("more or less than the sink is left out of the probabilities")
    return replace(plan, sink_is_dropped=True)


@apply.register
def _dropout(term: Dropout, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    if not plan.may_draw:
        raise Refused("dropout would draw other numbers than eager")
    if plan.dropout or term.rate >= 1:
        raise Refused("dropout twice, or of everything")
    return replace(plan, dropout=term.rate)


@apply.register
def _zero_where(term: ZeroWhere, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    """Probabilities are set to zero by the mask of the scores, which changes only rows without a key."""
    if len(plan.scores.masks) != 1 or plan.steps:
        raise Refused("probabilities are masked otherwise than the scores")
    ((own, own_masks_out),) = plan.scores.masks
    (node, negated), (other, other_negated) = negation(draft.program, term.mask), negation(draft.program, own)
    if not _same(draft, node, other) or (term.masks_out ^ negated) != (own_masks_out ^ other_negated):
        raise Refused("probabilities are masked otherwise than the scores")
    return replace(plan, empty_rows_are_zero=True)


def _same(draft: Draft, value: Any, expression: Any) -> bool:
    """Is this value of the program what an expression computes?"""
    sheet = draft.program
    real = sheet.real(expression) if isinstance(expression, Node) else expression
    if real is not None or not isinstance(value, Node):
        return same_value(sheet.origin, value, real)
    first, second = sheet.call(value), sheet.call(expression)
    if first is None or second is None or first.op != second.op or set(first.args) != set(second.args):
        return False
    written = first.mutates or sheet.aliasing.written(value)
    return not written and all(_same(draft, first.args[k], second.args[k]) for k in first.args)


@apply.register
def _nan_to_zero(term: NanToZero, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    """A softmax is NaN in a whole row or nowhere, and never infinite."""
    if plan.factors or not math.isfinite(plan.factor):
        raise Refused("NaN becomes another number than zero")
    return replace(plan, nan_is_zero=True)


@apply.register
def _scale(term: Scale, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    return replace(plan, factor=plan.factor * term.number)


@apply.register
def _factor(term: Factor, plan: ProbabilityPlan, draft: Draft) -> ProbabilityPlan:
    value = draft.of(term.factor)
    if not term.divide and _is_own_mask(draft, term.factor, plan):
        finite = -math.inf not in plan.scores.fills
        return replace(plan, empty_rows_are_zero=plan.empty_rows_are_zero or finite)
    if not value.is_float:
        raise Refused("a factor of the probabilities that is not a floating-point tensor")
    value = aligned(draft, draft.rdiv(value, 1) if term.divide else value, term.before.layout)
    if plan.scores.sink is not None and not plan.sink_is_dropped and not known(value.shape[-1] == 1):
        raise Refused("a factor of the probabilities with a sink beside them")
    if not known(value.shape[-1] == 1) and not known(value.shape[-2] == 1):
        raise Refused("a factor of the probabilities that varies with query and key")
    return replace(plan, factors=(*plan.factors, (len(plan.steps), value)))


def _is_own_mask(draft: Draft, factor: Node, plan: ProbabilityPlan) -> bool:
    """Is the factor the mask of the scores, as zeros and ones? Rows without a key become zero by it, or stay NaN."""
    program, masks = draft.program, plan.scores.masks
    by = choice(program, factor) if len(masks) == 1 and not plan.steps else None
    own = choice(program, masks[0][0]) if by is not None and by.is_mask else None
    if by is None or own is None or not own.is_mask:
        return False
    if not by.same_places(program.origin, replace(own, mask=program.real(own.mask) or own.mask)):
        return False
    return (by.high == own.high) != masks[0][1]


def float_kind(*dtypes: torch.dtype) -> torch.dtype:
    """The narrowest dtype that holds all values of these."""
    return functools.reduce(torch.promote_types, dtypes)
