"""Second phase, the mask: the mask argument of the kernel, and the result of fully masked rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ir.dtypes import rounded
from ..ir.facts import known, known_equal
from ..ir.program import Value
from ..ir.values import Knowledge, knowledge
from ..ir.values.choices import levels, never_infinite
from ..rewrite.refusal import Refused
from .draft import Draft, Sheet
from .probability_rules import ProbabilityPlan
from .rule import is_decomposed
from .score_plan import ScorePlan
from .score_rules import LOST_IN_FLOAT32
from .sinks import beside, further_keys, with_zero_rows

ABSORBS = 4.0
"""A fill absorbs scores if floats of half its magnitude are at least this far apart: a score added to such a number is
lost to rounding."""


@dataclass(frozen=True)
class MaskedCall:
    """The arguments of the kernel, and how rows without a key are treated. Values are expressions of a draft, with the
    axes (batch, heads, rows, columns)."""

    q: Value
    k: Value
    v: Value
    attn_mask: Value | None = None
    is_causal: bool = False
    hides_later: bool = False
    """With a causal mask: is NaN in a later key hidden, too? It is if scores are filled, but not if -inf is added."""
    finite_rows: Value | None = None
    """Which queries have a key whose bias is not -inf; results and gradients of the others are NaN."""
    kept_rows: Value | None = None
    """Which queries have a key that the mask keeps."""
    without_keys: float = math.nan
    """The result of queries that have no such key."""
    key_gradient: Value | None = None
    """Zeros to add to the result: through them the keys get the gradient of rows whose bias is low everywhere."""

    def covers(self, mask: Value) -> bool:
        """Are there as many queries as keys, and has the mask an element for each pair?"""
        sizes = [self.q.shape[-2], self.k.shape[-2]]
        return known_equal(*sizes) and known_equal(mask.shape[-2:], sizes)


@dataclass(frozen=True)
class MaskPlanner:
    """Decides on the mask of one call, given the bias, the mask and the fills of the scores."""

    draft: Draft
    scores: ScorePlan
    below: ProbabilityPlan
    scores_dtype: torch.dtype
    """The dtype of the softmax's operand."""
    dtype: torch.dtype
    """The dtype in which the mask is computed."""
    rounded_to: torch.dtype | None
    """The dtype to which autocast rounds the mask, if that is another one."""
    sink: Value | None

    @property
    def sheet(self) -> Sheet:
        return self.draft.program

    @property
    def know(self) -> Knowledge:
        return knowledge(self.sheet)

    def masked(self, call: MaskedCall, bias: Value | None, keep: Value | None, floor: Value | None) -> MaskedCall:
        """The call with its mask: `bias` added to the scores where `keep` is true, `floor` or the fills elsewhere."""
        if keep is not None and self.know.is_all_true(keep.node):
            keep = floor = None
        if bias is not None and self.know.is_zero(bias.node):
            bias = None
        if self.sink is not None and self.below.empty_rows_are_zero:
            raise Refused("probabilities are set to zero beside a sink")
        if keep is None:
            call = self._without_mask(call, bias)
        elif self.scores.fills_count:
            call = self._keep_fills(call, keep, bias, floor)
        elif bias is None and floor is None and self.sink is None:
            call = self._keep(call, keep)
        elif self.scores.fills == {-math.inf}:
            call = self._minus_infinity_and_bias(call, keep, bias, floor)
        else:
            call = self._keep_and_bias(call, keep, bias, floor)
        if self.rounded_to is not None and call.attn_mask is not None and call.attn_mask.is_float:
            return replace(call, attn_mask=self._rounded(call.attn_mask, self.rounded_to))
        return call

    def _rounded(self, bias: Value, dtype: torch.dtype) -> Value:
        """Rounds the bias as autocast does, without losing a row. Numbers far below the highest one of their row have
        no weight, so the distance from the highest is rounded instead of the number itself."""
        draft, numbers = self.draft, levels(self.sheet, bias.node)
        if numbers is None or len(numbers - {0.0}) > 1:
            highest = draft.amax(self._detached(bias), dim=[-1], keepdim=True)
            bias = draft.sub(bias, draft.where(draft.gt(highest, -math.inf), highest, 0.0))
        elif any(math.isfinite(n) and math.isinf(rounded(n, dtype)) for n in numbers):
            bias = draft.clamp(bias, min=torch.finfo(dtype).min)
        return draft.to(bias, dtype=dtype)

    # ---- a bias ----

    def _without_mask(self, call: MaskedCall, bias: Value | None) -> MaskedCall:
        if bias is not None:
            return self._bias(call, bias)
        return call if self.sink is None else replace(call, attn_mask=self._with_sink(call, None))

    def _bias(self, call: MaskedCall, bias: Value, filled: bool = False) -> MaskedCall:
        """The bias becomes the mask. A row that is -inf everywhere gives NaN in eager, but not in the kernels.

        `filled`: fills are part of the bias.
        """
        lowest = max(torch.finfo(self.scores.summed_in).min, 2 * self.scores.lowest_score)
        if self.sink is None and call.covers(bias) and self.know.is_causal_bias(bias.node, lowest):
            return replace(call, is_causal=True)
        call = replace(call, attn_mask=self._with_sink(call, bias))
        if self.sink is None and self.know.bias_keeps_one(bias.node, lowest):
            return call
        if not never_infinite(self.sheet, bias.node):
            # a row is NaN if all of it is -inf, and if anything in it is NaN or infinite
            call = replace(call, finite_rows=self.draft.lt(self.draft.abs(self._highest(bias)), math.inf))
        if self._may_sink(bias):
            sunk = self.draft.lt(self._highest(bias), self._depth)
            return self._raised(call, bias, sunk, gradient=not (filled or self.scores.filled_by_bias))
        return call

    def _may_sink(self, bias: Value) -> bool:
        """Could a row be so low everywhere that its products are lost to rounding in eager, and not in the kernel?

        In half precision they are lost earlier than in the kernel, which adds in float32; and the backward kernels
        compute the sum of a row from a logarithm, which is lost to rounding beside such low numbers too.
        """
        numbers = levels(self.sheet, bias.node)
        if numbers is not None and all(n > self._depth for n in numbers):
            return False
        if self.sheet.is_training:
            return True
        same_in_kernel = self.scores.summed_in in (torch.float32, torch.float64) and self.rounded_to is None
        return not same_in_kernel and not (numbers is not None and all(n == 0 or n < LOST_IN_FLOAT32 for n in numbers))

    @property
    def _depth(self) -> float:
        return -2 * ABSORBS / torch.finfo(self.scores.summed_in).eps

    def _highest(self, bias: Value) -> Value:
        highest = self.draft.amax(self._detached(bias), dim=[-1], keepdim=True)
        return highest if self.sink is None else self.draft.maximum(highest, self._detached(self.sink))

    def _detached(self, value: Value) -> Value:
        return value if is_decomposed(self.sheet) else self.draft.detach(value)

    def _any(self, rows: Value, low: float) -> Value:
        """Which queries have a key for which `rows` is true, or a sink above `low`."""
        has_key = self.draft.any(rows, dim=-1, keepdim=True)
        return has_key if self.sink is None else self.draft.logical_or(has_key, self.draft.gt(self.sink, low))

    def _with_sink(self, call: MaskedCall, bias: Value | None) -> Value | None:
        if self.sink is None:
            return bias
        return beside(self.draft, bias, self.sink, call.k.shape[-2], self.further_keys(call))

    def further_keys(self, call: MaskedCall) -> int:
        """How many keys are added for the sink."""
        return further_keys(call.k)

    def _raised(self, call: MaskedCall, bias: Value, sunk: Value, gradient: bool = True) -> MaskedCall:
        """In rows that are low everywhere (`sunk`), ignore the products and subtract the highest bias of the row."""
        draft = self.draft
        assert call.attn_mask is not None
        attn_mask = draft.sub(call.attn_mask, draft.where(sunk, self._highest(bias), 0.0))
        if not gradient:
            return replace(call, attn_mask=attn_mask, q=draft.where(sunk, 0.0, call.q))
        # zero, but NaN stays NaN, and there is a gradient, as in eager
        idle = draft.where(sunk, draft.sub(call.q, self._detached(call.q)), call.q)
        wants_gradient = self.sheet.is_training and self.sink is None
        key_gradient = self._key_gradient(call, bias, sunk) if wants_gradient else None
        return replace(call, attn_mask=attn_mask, q=idle, key_gradient=key_gradient)

    def _key_gradient(self, call: MaskedCall, bias: Value, sunk: Value) -> Value:
        """scale / n * q (k - detach(k))^T (v - mean(v)), in rows whose n keys are all equally low

        Such a row weighs its keys by 1 / n each, whatever the products are, and the kernel gets zeros for its query, so
        it has no gradient for the keys. Eager has one: for key j, scale / n * q (v_j - mean(v))^T times the gradient of
        the row's result.
        """
        draft = self.draft
        lowest = draft.amin(self._detached(bias), dim=[-1], keepdim=True)
        even = draft.logical_and(sunk, draft.eq(lowest, self._highest(bias)))
        q, v = draft.detach(call.q), draft.detach(call.v)
        apart = draft.sub(v, draft.mean(v, dim=[-2], keepdim=True))
        keys = draft.permute(draft.sub(call.k, draft.detach(call.k)), [0, 1, 3, 2])
        summed = draft.matmul(draft.mul(draft.where(even, q, 0.0), self.scores.scale), draft.matmul(keys, apart))
        return draft.where(even, draft.div(summed, call.k.shape[-2]), 0.0)

    # ---- a mask ----

    def _keep(self, call: MaskedCall, keep: Value) -> MaskedCall:
        draft = self.draft
        if call.covers(keep) and self.know.is_causal(keep.node):
            return replace(call, is_causal=True, hides_later=self.scores.is_filled)
        if self.below.empty_rows_are_zero or self.scores.fills == {-math.inf}:
            call, attn_mask = self._kept(call, keep)
            return replace(call, attn_mask=attn_mask)
        if self.know.every_row_keeps_one(keep.node):
            return replace(call, attn_mask=keep)
        rows = draft.any(keep, dim=-1, keepdim=True)  # in a row without keys all fills, and so all weights, are equal
        q = draft.where(rows, call.q, 0.0)
        return replace(call, q=q, attn_mask=draft.logical_or(keep, draft.logical_not(rows)))

    def _kept(self, call: MaskedCall, keep: Value) -> tuple[MaskedCall, Value]:
        """The mask for the kernel, which need not treat rows without a key: their result is set afterwards."""
        if self.know.every_row_keeps_one(keep.node):
            return call, keep
        rows = self.draft.any(keep, dim=-1, keepdim=True)
        if self.scores.cut_by_sum:
            if self.below.empty_rows_are_zero:
                raise Refused("probabilities are set to zero where -inf was added")
            call = replace(call, finite_rows=rows)
        else:
            call = replace(call, kept_rows=rows)
        if self.below.empty_rows_are_zero or self.below.nan_is_zero:
            call = replace(call, without_keys=0.0)
        return call, self.draft.logical_or(keep, self.draft.logical_not(rows)) if self.sheet.is_training else keep

    # ---- both ----

    def _minus_infinity_and_bias(
        self, call: MaskedCall, keep: Value, bias: Value | None, floor: Value | None
    ) -> MaskedCall:
        if self.below.empty_rows_are_zero:
            raise Refused("probabilities are set to zero beside a bias")
        zero = self.draft.full([], 0.0, dtype=self.dtype, device=call.q.device)
        if bias is None:  # there is a sink then, which every row keeps
            return self._bias(call, self.draft.where(keep, zero, -math.inf))
        if self.scores.cut_by_sum:
            return self._bias(call, self.draft.add(bias, self.draft.where(keep, zero, -math.inf)))
        if self.sink is None:
            call, keep = self._kept(call, keep)
        return self._bias(call, self.draft.where(keep, bias, -math.inf if floor is None else floor))

    def _keep_and_bias(self, call: MaskedCall, keep: Value, bias: Value | None, floor: Value | None) -> MaskedCall:
        """Fills with finite numbers, together with a bias. In rows whose kept keys are all as low as the filled ones,
        both have weight, and the products are lost to rounding beside such low numbers; so the queries of these rows
        are set to zero."""
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
            bias = draft.full([], 0.0, dtype=dtype, device=call.q.device)
        else:
            rows = self._any(draft.logical_and(keep, draft.gt(bias, highest / 2)), highest / 2)
        mask = draft.where(keep, bias, filled)
        mask = mask if mask.dtype == dtype else draft.to(mask, dtype=dtype)
        call = replace(call, attn_mask=self._with_sink(call, mask))
        if self.know.every_row_keeps_one(keep.node) and self.scores.bias is None:
            return call
        finite_rows = self._any(draft.gt(mask, -math.inf), -math.inf)
        # a row that is -inf everywhere is NaN, and so is the gradient of its query
        sunk = draft.logical_and(draft.logical_not(rows), finite_rows)
        return self._raised(replace(call, finite_rows=finite_rows), mask, sunk, gradient=False)

    def _keep_fills(self, call: MaskedCall, keep: Value, bias: Value | None, floor: Value | None) -> MaskedCall:
        """Fills that may have weight: a key that is masked for all queries becomes zero, so that its score is the
        fill, which is added. If queries differ in their masks, each key appears twice, once unchanged and once as
        zero, and the mask leaves one of the two to each query."""
        draft, dtype, lowest = self.draft, self.dtype, min(self.scores.fills)
        k, v, device = call.k, call.v, call.q.device
        if lowest < torch.finfo(dtype).min and lowest != -math.inf:
            raise Refused(f"{dtype} does not hold {lowest}, which scores are filled with")
        unfilled: Any = draft.full([], 0.0, dtype=dtype, device=device) if bias is None else bias
        filled: Any = draft.full([], lowest, dtype=dtype, device=device) if floor is None else floor
        if known(keep.shape[-2] == 1):
            keys = draft.permute(keep, [0, 1, 3, 2])
            k = draft.where(keys, k, 0.0)
            if self.below.empty_rows_are_zero:
                v = draft.where(keys, v, 0.0)
            mask = self._lifted(draft.where(keep, unfilled, filled), keep)
            return self._bias(replace(call, k=k, v=v), mask, filled=True)
        cut = draft.full([], -math.inf, dtype=dtype, device=device)
        count = k.shape[-2]
        parts = [draft.where(keep, unfilled, cut), draft.where(keep, cut, filled)]
        wide = [p if known_equal(p.shape[-1], count) else draft.expand(p, [*p.shape[:-1], count]) for p in parts]
        k = with_zero_rows(draft, k, count)
        twice = not self.below.empty_rows_are_zero
        v = draft.cat([v, v], dim=-2) if twice else with_zero_rows(draft, v, count)
        mask = self._lifted(draft.cat(_broadcast(draft, wide), dim=-1), keep)
        return self._bias(replace(call, k=k, v=v), mask, filled=True)

    def _lifted(self, mask: Value, keep: Value) -> Value:
        """Subtracts the highest fill from a row without a key: otherwise the backward kernels would lose precision to
        the magnitude of the fills."""
        if not self.sheet.is_training or self.sink is not None or self.know.every_row_keeps_one(keep.node):
            return mask
        highest = self._highest(mask)
        dead = self.draft.logical_and(self.draft.logical_not(self._any(keep, 0.0)), self.draft.gt(highest, -math.inf))
        return self.draft.sub(mask, self.draft.where(dead, highest, 0.0))


def _broadcast(draft: Draft, values: Sequence[Value]) -> list[Value]:
    """The values, expanded to the shape that all of them broadcast to."""
    shapes = [v.shape for v in values]
    whole = [next((s for s in sizes if not known(s == 1)), 1) for sizes in zip(*shapes)]
    return [v if known_equal(v.shape, whole) else draft.expand(v, whole) for v in values]
