"""Second phase, the mask: which mask the kernel takes, and what rows give of which all keys are masked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..ir.facts import known, known_equal
from ..ir.program import Value
from ..rewrite.refusal import Refused
from .draft import Draft
from .masks import is_lower_triangle, keeps_a_key, levels, never_infinite, rounded
from .probability_rules import ProbabilityPlan
from .score_plan import ScorePlan
from .score_rules import LOST_IN_FLOAT32
from .sinks import beside, further_keys, with_zero_rows

ABSORBS = 4.0
"""A fill so low that numbers half as low are this far apart: scores added to such a number are lost in it."""


class MaskPlanner:
    """The mask of one call, and what it asks of queries, keys, values and result. Values are expressions of a draft,
    with the axes (batch, heads, rows, columns)."""

    def __init__(
        self,
        draft: Draft,
        operands: Sequence[Value],
        scores: ScorePlan,
        below: ProbabilityPlan,
        scores_dtype: torch.dtype,
        dtype: torch.dtype,
        narrow: torch.dtype | None,
        sink: Value | None,
    ) -> None:
        self.draft, self.program, self.scores, self.below = draft, draft.program, scores, below
        self.q, self.k, self.v = operands
        self.scores_dtype = scores_dtype
        """The dtype of the softmax's operand."""
        self.dtype, self.rounded_to = dtype, narrow if narrow != dtype else None
        """In which the mask is computed, and what autocast rounds it to."""
        self.know = draft.program.knowledge
        self.sink = sink
        self.attn_mask: Value | None = None
        self.is_causal = False
        self.finite_rows: Value | None = None
        """Which queries have a key whose bias is not -inf; the others are NaN, and so are their gradients."""
        self.kept_rows: Value | None = None
        """Which queries have a key that the mask keeps."""
        self.without_keys: float = math.nan
        """What the others get."""

    @property
    def square(self) -> bool:
        return known_equal(self.q.shape[-2], self.k.shape[-2])

    @property
    def further_keys(self) -> int:
        """How many keys are added for the sink."""
        return further_keys(self.k)

    def mask(self, bias: Value | None, keep: Value | None, floor: Value | None) -> None:
        if keep is not None and self.know.is_all_true(keep.node):
            keep = floor = None
        if bias is not None and self.know.is_zero(bias.node):
            bias = None
        if self.sink is not None and self.below.empty_rows_are_zero:
            raise Refused("probabilities are set to zero beside a sink")
        if keep is None:
            if bias is not None:
                self._bias(bias)
            elif self.sink is not None:
                self.attn_mask = self._with_sink(None)
        elif self.scores.fills_count:
            self._keep_fills(keep, bias, floor)
        elif bias is None and floor is None and self.sink is None:
            self._keep(keep)
        elif self.scores.fills == {-math.inf}:
            if self.below.empty_rows_are_zero:
                raise Refused("probabilities are set to zero beside a bias")
            zero = self.draft.full([], 0.0, dtype=self.dtype, device=self.q.device)
            if bias is None:  # and a sink, which every row keeps
                self._bias(self.draft.where(keep, zero, -math.inf))
            elif self.scores.cut_by_sum:
                self._bias(self.draft.add(bias, self.draft.where(keep, zero, -math.inf)))
            else:
                filled = -math.inf if floor is None else floor
                self._bias(self.draft.where(keep if self.sink is not None else self._kept(keep), bias, filled))
        else:
            self._keep_and_bias(keep, bias, floor)
        if self.rounded_to is not None and self.attn_mask is not None and self.attn_mask.is_float:
            self.attn_mask = self._rounded(self.attn_mask, self.rounded_to)

    def _rounded(self, bias: Value, dtype: torch.dtype) -> Value:
        """As autocast would round it, and yet no row is lost: what is far below the highest of a row has no weight, and
        so it is the distance from there that is rounded."""
        draft, numbers = self.draft, levels(self.program, bias.node)
        if numbers is None or len(numbers - {0.0}) > 1:
            highest = draft.amax(draft.detach(bias), dim=[-1], keepdim=True)
            bias = draft.sub(bias, draft.where(draft.gt(highest, -math.inf), highest, 0.0))
        elif any(math.isfinite(n) and math.isinf(rounded(n, dtype)) for n in numbers):
            bias = draft.clamp(bias, min=torch.finfo(dtype).min)
        return draft.to(bias, dtype=dtype)

    def _bias(self, bias: Value, filled: bool = False) -> None:
        """As it is; a row that is -inf everywhere gives NaN in eager, which the kernels do not say.

        `filled`: fills are part of the bias.
        """
        lowest = max(torch.finfo(self.scores.summed_in).min, 2 * self.scores.lowest_score)
        kept = keeps_a_key(self.program, bias.node, lowest) if self.sink is None else None
        if kept is not None and self.square and known_equal(bias.shape[-2:], [self.q.shape[-2], self.k.shape[-2]]):
            if is_lower_triangle(kept):
                self.is_causal = True
                return
        self.attn_mask = self._with_sink(bias)
        if kept is not None:
            return
        if not never_infinite(self.program, bias.node):
            # a row is NaN if all of it is -inf, and if anything in it is NaN or infinite
            self.finite_rows = self.draft.lt(self.draft.abs(self._highest(bias)), math.inf)
        if self._may_sink(bias):
            self._raise(bias, self._sunk(bias), gradient=not (filled or self.scores.filled_by_bias))

    def _may_sink(self, bias: Value) -> bool:
        """Could a row be so low everywhere that its products are lost in it, and the kernel not do the same?

        In half precision they are lost earlier than in the kernel, which adds in float32; and the backward kernels
        take the sum of a row from a logarithm, which is lost in such low numbers too.
        """
        numbers = levels(self.program, bias.node)
        if numbers is not None and all(n > self._depth for n in numbers):
            return False
        if self.program.is_training:
            return True
        same_in_kernel = self.scores.summed_in in (torch.float32, torch.float64) and self.rounded_to is None
        return not same_in_kernel and not (numbers is not None and all(n == 0 or n < LOST_IN_FLOAT32 for n in numbers))

    @property
    def _depth(self) -> float:
        return -2 * ABSORBS / torch.finfo(self.scores.summed_in).eps

    def _sunk(self, bias: Value) -> Value:
        return self.draft.lt(self._highest(bias), self._depth)

    def _highest(self, bias: Value) -> Value:
        highest = self.draft.amax(self.draft.detach(bias), dim=[-1], keepdim=True)
        return highest if self.sink is None else self.draft.maximum(highest, self.draft.detach(self.sink))

    def _any(self, rows: Value, low: float) -> Value:
        """Which queries have a key of which it is true, or a sink that is not as low."""
        has_key = self.draft.any(rows, dim=-1, keepdim=True)
        return has_key if self.sink is None else self.draft.logical_or(has_key, self.draft.gt(self.sink, low))

    def _with_sink(self, bias: Value | None) -> Value | None:
        if self.sink is None:
            return bias
        return beside(self.draft, bias, self.sink, self.k.shape[-2], self.further_keys)

    def _raise(self, bias: Value, sunk: Value, gradient: bool = True) -> None:
        """Rows that are low everywhere: their products count nothing, their bias counts from its highest."""
        draft = self.draft
        assert self.attn_mask is not None
        self.attn_mask = draft.sub(self.attn_mask, draft.where(sunk, self._highest(bias), 0.0))
        idle: Any = 0.0
        if gradient and self.program.is_training:  # no value, and yet a gradient, as eager has it
            idle = draft.sub(self.q, draft.detach(self.q))
        self.q = draft.where(sunk, idle, self.q)

    def _keep(self, keep: Value) -> None:
        draft = self.draft
        if self.square and known_equal(keep.shape[-2:], [self.q.shape[-2], self.k.shape[-2]]):
            if self.know.is_causal(keep.node):
                self.is_causal = True
                return
        if self.below.empty_rows_are_zero or self.scores.fills == {-math.inf}:
            self.attn_mask = self._kept(keep)
            return
        self.attn_mask = keep
        if not self.know.every_row_keeps_one(keep.node):  # all keys are filled alike: so they weigh alike
            rows = draft.any(keep, dim=-1, keepdim=True)
            self.q = draft.where(rows, self.q, 0.0)
            self.attn_mask = draft.logical_or(keep, draft.logical_not(rows))

    def _kept(self, keep: Value) -> Value:
        """The mask for the kernel, which need not see rows without a key: what they get is chosen afterwards."""
        if self.know.every_row_keeps_one(keep.node):
            return keep
        rows = self.draft.any(keep, dim=-1, keepdim=True)
        if self.scores.cut_by_sum:
            if self.below.empty_rows_are_zero:
                raise Refused("probabilities are set to zero where -inf was added")
            self.finite_rows = rows
        else:
            self.kept_rows = rows
        if self.below.empty_rows_are_zero or self.below.nan_is_zero:
            self.without_keys = 0.0
        if not self.program.is_training:
            return keep
        return self.draft.logical_or(keep, self.draft.logical_not(rows))

    def _keep_and_bias(self, keep: Value, bias: Value | None, floor: Value | None) -> None:
        """Filled with finite numbers beside a bias: rows whose kept keys are all as low as the filled ones weigh
        them together, and there the products are lost in such low numbers; so their queries are set to zero."""
        draft, dtype = self.draft, self.dtype
        finite = [f for f in self.scores.fills if f != -math.inf]
        highest = max(finite)
        spacing = torch.finfo(self.scores_dtype).eps * -highest / 2
        if bias is not None and (spacing < ABSORBS or len(finite) != len(self.scores.fills)):
            raise Refused(f"a mask that fills with {highest} beside a bias that may be as low")
        if self.below.empty_rows_are_zero:
            raise Refused("probabilities are set to zero beside a bias")
        lowest = torch.finfo(dtype).min
        filled: Any = floor if floor is not None else max(highest, lowest)
        if bias is None:
            rows = self._any(keep, highest / 2)
            bias = draft.full([], 0.0, dtype=dtype, device=self.q.device)
        else:
            rows = self._any(draft.logical_and(keep, draft.gt(bias, highest / 2)), highest / 2)
        mask = draft.where(keep, bias, filled)
        mask = mask if mask.dtype == dtype else draft.to(mask, dtype=dtype)
        self.attn_mask = self._with_sink(mask)
        if not self.know.every_row_keeps_one(keep.node) or self.scores.bias is not None:
            self.finite_rows = self._any(draft.gt(mask, -math.inf), -math.inf)
            # a row that is -inf everywhere is NaN, and so is the gradient of its query
            self._raise(mask, draft.logical_and(draft.logical_not(rows), self.finite_rows), gradient=False)

    def _keep_fills(self, keep: Value, bias: Value | None, floor: Value | None) -> None:
        """Fills that may have weight: a key that is masked for all queries becomes zero, so that its score is the
        fill, which is added. If queries differ in their masks, each key is there twice, once as it is and once as
        zero, and the mask leaves one of the two to each query."""
        draft, dtype, lowest = self.draft, self.dtype, min(self.scores.fills)
        if lowest < torch.finfo(dtype).min and lowest != -math.inf:
            raise Refused(f"{dtype} does not hold {lowest}, which scores are filled with")
        kept: Any = draft.full([], 0.0, dtype=dtype, device=self.q.device) if bias is None else bias
        filled: Any = draft.full([], lowest, dtype=dtype, device=self.q.device) if floor is None else floor
        if known(keep.shape[-2] == 1):
            keys = draft.permute(keep, [0, 1, 3, 2])
            self.k = draft.where(keys, self.k, 0.0)
            if self.below.empty_rows_are_zero:
                self.v = draft.where(keys, self.v, 0.0)
            return self._bias(self._lifted(draft.where(keep, kept, filled), keep), filled=True)
        cut = draft.full([], -math.inf, dtype=dtype, device=self.q.device)
        count = self.k.shape[-2]
        parts = [draft.where(keep, kept, cut), draft.where(keep, cut, filled)]
        wide = [p if known_equal(p.shape[-1], count) else draft.expand(p, [*p.shape[:-1], count]) for p in parts]
        self.k = with_zero_rows(draft, self.k, count)
        twice = not self.below.empty_rows_are_zero
        self.v = draft.cat([self.v, self.v], dim=-2) if twice else with_zero_rows(draft, self.v, count)
        return self._bias(self._lifted(draft.cat(_broadcast(draft, wide), dim=-1), keep), filled=True)

    def _lifted(self, mask: Value, keep: Value) -> Value:
        """A row without a key counts from its highest fill: the backward kernels would round by its size otherwise."""
        if not self.program.is_training or self.sink is not None or self.know.every_row_keeps_one(keep.node):
            return mask
        highest = self._highest(mask)
        dead = self.draft.logical_and(self.draft.logical_not(self._any(keep, 0.0)), self.draft.gt(highest, -math.inf))
        return self.draft.sub(mask, self.draft.where(dead, highest, 0.0))


def _broadcast(draft: Draft, values: Sequence[Value]) -> list[Value]:
    """The values, expanded to the shape that all of them broadcast to."""
    shapes = [v.shape for v in values]
    whole = [next((s for s in sizes if not known(s == 1)), 1) for sizes in zip(*shapes)]
    return [v if known_equal(v.shape, whole) else draft.expand(v, whole) for v in values]
