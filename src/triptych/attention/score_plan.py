"""The plan of the scores: `scale * Q K^T * factors + bias` where the mask keeps a score, fills elsewhere.

A `ScorePlan` says what must be computed. The history of the scores is not stored in separate fields: it is derived from
the trail, the terms so far with the plan that each of them was applied to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.facts import known
from ..ir.program import Value
from ..ir.values.choices import Choice, never_infinite
from .layout import BatchStep, Layout
from .masks import MARGIN
from .terms import Bias, CutOff, Factor, Mask, ScoreType, Shift, Sink, Term


@dataclass(frozen=True)
class PlannedFactor:
    """A factor of the scores: a number, or a tensor with the axes (batch, queries, keys)."""

    term: Factor
    steps: int
    """How many steps of the batch axes come before it."""
    value: Value


@dataclass(frozen=True)
class Gate:
    """A factor of zeros and ones: it becomes a mask once a low number is added where it is zero."""

    by: Choice
    factor: PlannedFactor
    layout: Layout
    bias_before: Value | None
    bias_after: Value | None


# ---- terms that are combined from several terms ----


@dataclass(frozen=True)
class GateMask(Term):
    """A factor of zeros and ones, and a bias that is low where it is zero: a mask."""

    gate: Gate
    keep: Value
    fill: float


@dataclass(frozen=True)
class MaskAsBias(Term):
    """The mask so far becomes part of the bias, before the scores are multiplied by a tensor."""


# ---- the plan ----


@dataclass(frozen=True)
class ScorePlan:
    """The scores after some terms. Values are expressions of a draft."""

    product_dtype: torch.dtype
    lowest_score: float
    """Scores that are not masked are assumed to be above this number."""
    scale: float = 1.0
    factors: Sequence[PlannedFactor] = ()
    steps: Sequence[BatchStep] = ()
    """How views have changed the batch axes."""
    bias: Value | None = None
    keep: Value | None = None
    """Where a score is kept; it broadcasts to the scores."""
    fills: frozenset[float] = frozenset()
    """The numbers in place of masked scores, as they were filled in and scaled since."""
    floor: Value | None = None
    """The fills as a tensor, if they are not a single number."""
    sink: Value | None = None
    """A further column of scores, which has no key."""
    gates: Sequence[Gate] = ()
    """Factors that may still become masks."""
    trail: Sequence[tuple[Term, ScorePlan]] = ()

    # ---- the history of the scores ----

    @property
    def shifted(self) -> bool:
        """Was a number added to all scores of a row before a sink was joined, and left out of the plan? It matters only
        for a sink that is joined later; a number that is added after the sink shifts the sink as well."""
        return any(isinstance(term, Shift) and plan.sink is None for term, plan in self.trail)

    @property
    def undefined(self) -> bool:
        """May a row have been -inf everywhere when its maximum was subtracted? Then it is NaN, even if it is filled."""
        return any(
            isinstance(term, Shift) and term.is_own_maximum and plan.may_be_minus_infinity for term, plan in self.trail
        )

    @property
    def may_be_minus_infinity(self) -> bool:
        bias = self.bias
        return -math.inf in self.fills or bias is not None and not never_infinite(bias.program, bias.node)

    @property
    def fills_count(self) -> bool:
        """May a score that is not masked be as low as a fill? Then masked keys have weight."""
        return any(isinstance(t, (Mask, GateMask)) and plan.may_count(t.fill, t.before) for t, plan in self.trail)

    def may_count(self, fill: float, scores: ScoreType) -> bool:
        """May a score, as it is after this plan, be as low as a fill?"""
        if fill <= max(torch.finfo(scores.dtype).min, 2 * self.lowest_score):
            return False
        if self.bias is None and not self.factors and not self.shifted:
            lowest = torch.finfo(self.product_dtype).min * abs(self.scale)
            return not fill <= lowest - MARGIN
        return True

    @property
    def varies_after_shift(self) -> bool:
        """Were scores shifted, and then multiplied by a tensor that varies with the key? The shift that was left out
        would vary too."""
        varying = [f.term for f in self.factors if f.value.rank and not known(f.value.shape[-1] == 1)]
        return any(plan.shifted for term, plan in self.trail if any(term is v for v in varying))

    @property
    def filled_by_bias(self) -> bool:
        """Are fills or clamped numbers part of the bias? Where they make up a whole row, no gradient reaches the
        scores."""
        return any(isinstance(term, (MaskAsBias, CutOff)) for term, _ in self.trail)

    @property
    def cut_by_sum(self) -> bool:
        """Was the mask applied by adding -inf? Where that makes a row NaN, all its gradients are NaN too."""
        fills = [term.fill for term, _ in self.trail if isinstance(term, GateMask)]
        return bool(fills) and fills[-1] == -math.inf

    @property
    def is_filled(self) -> bool:
        """Are all masked scores replaced, whatever they are? A product with zeros and ones would leave NaN."""
        return not any(isinstance(term, GateMask) for term, _ in self.trail)

    @property
    def masks(self) -> list[tuple[Node, bool]]:
        """The masks that are not part of the bias, and whether each is true where a score is masked."""
        masks: list[tuple[Node, bool]] = []
        for term, _ in self.trail:
            if isinstance(term, Mask):
                masks.append((term.mask, term.masks_out))
            elif isinstance(term, GateMask):
                masks.append((term.keep.node, False))
            elif isinstance(term, MaskAsBias):
                masks.clear()
        return masks

    @property
    def summed_in(self) -> torch.dtype:
        """The dtype in which scores and bias were added."""
        sums = [term.summed_in for term, _ in self.trail if isinstance(term, (Bias, Shift))]
        return sums[-1] if sums else self.product_dtype

    @property
    def sink_is_first(self) -> bool:
        """Does the sink come before the scores?"""
        return any(isinstance(term, Sink) and term.joined.first for term, _ in self.trail)
