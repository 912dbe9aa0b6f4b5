"""What the terms of the scores come to: `scale * Q K^T * factors + bias` where the mask keeps a score, fills elsewhere.

A `ScorePlan` is what is to be computed. What became of the scores on the way is not noted in it: it is asked of the
trail, the terms so far with the plan that each of them was applied to.
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
    """What the scores are multiplied with: a number, or a tensor with the axes (batch, queries, keys)."""

    term: Factor
    steps: int
    """How many steps of the batch axes come before it."""
    value: Value


@dataclass(frozen=True)
class Gate:
    """Zeros and ones that the scores were multiplied with: a mask, once something low is added where they are zero."""

    by: Choice
    factor: PlannedFactor
    layout: Layout
    bias_before: Value | None
    bias_after: Value | None


# ---- terms that several terms make together ----


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
    """The scores behind some terms. Values are expressions of a draft."""

    product_dtype: torch.dtype
    lowest_score: float
    """Scores that no mask covers are said to lie above this."""
    scale: float = 1.0
    factors: Sequence[PlannedFactor] = ()
    steps: Sequence[BatchStep] = ()
    """What views have done to the batch axes."""
    bias: Value | None = None
    keep: Value | None = None
    """Where a score counts; as broad as it must be to be broadcast to the scores."""
    fills: frozenset[float] = frozenset()
    """What stands where it does not, as it was filled in and scaled since."""
    floor: Value | None = None
    """The same as a tensor, if it is not one number."""
    sink: Value | None = None
    """A further column of scores, which has no key."""
    gates: Sequence[Gate] = ()
    """Factors that may still become masks."""
    trail: Sequence[tuple[Term, ScorePlan]] = ()

    # ---- what became of the scores on the way ----

    @property
    def shifted(self) -> bool:
        """Was a number added to all scores of a row, and left out? Beside a sink that changes nothing but the sink."""
        return any(isinstance(term, Shift) and plan.sink is None for term, plan in self.trail)

    @property
    def undefined(self) -> bool:
        """May a row have been -inf everywhere when its maximum was subtracted? It is NaN then, whatever fills it."""
        return any(
            isinstance(term, Shift) and term.is_own_maximum and plan.may_be_minus_infinity for term, plan in self.trail
        )

    @property
    def may_be_minus_infinity(self) -> bool:
        bias = self.bias
        return -math.inf in self.fills or bias is not None and not never_infinite(bias.program, bias.node)

    @property
    def fills_count(self) -> bool:
        """May a score that no mask covers be as low as what is filled in? Then masked keys have weight."""
        return any(isinstance(t, (Mask, GateMask)) and plan.may_count(t.fill, t.before) for t, plan in self.trail)

    def may_count(self, fill: float, scores: ScoreType) -> bool:
        """May a score, as the plan has them now, be as low as a fill?"""
        if fill <= max(torch.finfo(scores.dtype).min, 2 * self.lowest_score):
            return False
        if self.bias is None and not self.factors and not self.shifted:
            lowest = torch.finfo(self.product_dtype).min * abs(self.scale)
            return not fill <= lowest - MARGIN
        return True

    @property
    def varies_after_shift(self) -> bool:
        """Were scores shifted, and then multiplied by what varies with the key? What was left out would vary too."""
        varying = [f.term for f in self.factors if f.value.rank and not known(f.value.shape[-1] == 1)]
        return any(plan.shifted for term, plan in self.trail if any(term is v for v in varying))

    @property
    def filled_by_bias(self) -> bool:
        """Is what was filled in or cut off in the bias? Where it is all of a row, no gradient reaches the scores."""
        return any(isinstance(term, (MaskAsBias, CutOff)) for term, _ in self.trail)

    @property
    def cut_by_sum(self) -> bool:
        """Is the mask -inf that was added? What is NaN by it, all its gradients are."""
        fills = [term.fill for term, _ in self.trail if isinstance(term, GateMask)]
        return bool(fills) and fills[-1] == -math.inf

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
        """Does the sink stand before the scores?"""
        return any(isinstance(term, Sink) and term.joined.first for term, _ in self.trail)
