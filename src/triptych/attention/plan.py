"""Second phase: decides which call computes an attention in normal form, and with which operands. No node is created.

The operands are expressions of a draft. A form that no kernel computes is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import size_hint
from ..ir.facts import known, known_equal
from ..ir.program import Value
from ..rewrite.refusal import Refused
from .draft import Draft, Sheet
from .layout import BatchStep, aligned
from .mask_plan import MaskedCall, MaskPlanner
from .operands import ONE_QUERY, apply_step, arranged, for_kernel, four_axes, laid_out, shape_of
from .probability_rules import ProbabilityPlan, float_kind, plan_probabilities
from .rule import is_decomposed
from .score_plan import ScorePlan
from .score_rules import plan_scores
from .sinks import require_quick_gradient, with_zero_rows
from .terms import Attention


@dataclass(frozen=True)
class AttentionPlan:
    """One call of scaled_dot_product_attention, and what must be done to its result. Values are expressions."""

    attention: Attention
    draft: Draft
    query: Value
    key: Value
    value: Value
    """As the kernel takes them: (batch, heads, rows, columns)."""
    dtype: torch.dtype
    """In which the kernel computes: that of its operands, or the one that autocast rounds them to."""
    narrow_value: Value
    """The values before they were padded with zeros to the width of the keys."""
    attn_mask: Value | None
    is_causal: bool
    may_have_kernel: bool
    """A fused kernel may compute the call. Otherwise torch computes it by products and a softmax."""
    hides_later: bool
    """With a causal mask: is NaN in a later key hidden as well?"""
    may_be_empty: bool
    """Is a row NaN if all products of its query are -inf? Beside a sink it is zero."""
    dropout: float
    scale: float
    finite_rows: Value | None
    """The queries whose result is used; that of the others is NaN, and so are all gradients that flow through it."""
    kept_rows: Value | None
    """The queries that have a key; the others get `without_keys`."""
    without_keys: float
    key_gradient: Value | None
    """Zeros to add to the result of the kernel, through which the keys get a gradient."""
    nan_is_zero: bool
    factors: Sequence[Value]
    """Tensors by which the result is multiplied."""
    batch: Sequence[Any]
    """The sizes of the batch axes of the factors, and of the result when it is multiplied by them."""
    result_batch: Sequence[Any]
    """The sizes of the batch axes of the product with the values."""
    factor: float

    @property
    def values(self) -> list[Value | None]:
        """All expressions that must be inserted into the graph."""
        operands = [self.query, self.key, self.value, self.narrow_value, self.attn_mask]
        return [*operands, self.finite_rows, self.kept_rows, self.key_gradient, *self.factors]

    @property
    def leaves(self) -> set[Node]:
        """The nodes of the graph that the call is computed from."""
        added = self.attention.values.added
        values = [self.draft.of(v) for v in self.values if v is not None]
        return {*self.draft.program.leaves(values), *([] if added is None else [added])}


def plan(sheet: Sheet, attention: Attention, may_draw: bool, lowest_score: float) -> AttentionPlan:
    """The plan of an attention; raises Refused where no kernel computes it. Expressions are built on the sheet."""
    draft = Draft(sheet, attention.values.node)
    product_dtype = sheet.origin.value(attention.product.node).dtype
    scores = plan_scores(draft, attention.score_terms, product_dtype, lowest_score)
    below = plan_probabilities(draft, attention.probability_terms, scores, may_draw)
    q, k = _queries_and_keys(draft, attention, scores)
    v, steps = _values(draft, attention), below.steps
    batch = list(v.shape[:-2])
    if is_decomposed(sheet) and (apart := _batch_before_merge(attention, below)) is not None:
        v, steps = draft.reshape(v, [*apart, *v.shape[-2:]]), ()
    outside, v = _factors_of_probabilities(draft, below.factors, steps, v)
    for step in steps:
        q, k = apply_step(draft, q, step), apply_step(draft, k, step)
    masks = [
        None if m is None else _as_operand(draft, aligned(draft, m, attention.scores.layout), attention, steps)
        for m in (scores.bias, scores.keep, scores.floor, scores.sink)
    ]
    return _call(draft, attention, (q, k, v), scores, below, masks, outside, batch)


# ---- operands ----


def _queries_and_keys(draft: Draft, attention: Attention, scores: ScorePlan) -> tuple[Value, Value]:
    product, axes, program = attention.product, attention.product.result_axes, draft.program.origin
    sizes: dict[str, Any] = {**dict(zip(axes, shape_of(product.node))), ONE_QUERY: 1}
    batch = [axes[d] for d in attention.layout.batch]
    (summed,) = product.summed
    query = attention.query or ONE_QUERY
    q = arranged(draft, program, product.left, product.left_axes, [*batch, query, summed], sizes)
    k = arranged(draft, program, product.right, product.right_axes, [*batch, attention.key, summed], sizes)
    for number in range(len(scores.steps) + 1):
        for factor in scores.factors:
            if factor.steps == number:
                q, k = _multiplied(draft, q, k, factor.value)
        if number < len(scores.steps):
            q, k = (apply_step(draft, x, scores.steps[number]) for x in (q, k))
    return q, k


def _multiplied(draft: Draft, q: Value, k: Value, factor: Value) -> tuple[Value, Value]:
    """A factor of the scores is applied to the queries if it is the same for all keys, else to the keys."""
    if not factor.is_tensor or factor.rank == 0 or known(factor.shape[-1] == 1):
        return _scaled(draft, q, factor), k
    if known(factor.shape[-2] == 1):
        return q, _scaled(draft, k, _transposed(draft, factor))
    raise Refused("a factor that varies with query and key")


def _values(draft: Draft, attention: Attention) -> Value:
    values = attention.values
    batch = [values.left_axes[d] for d in attention.probabilities.layout.batch]
    (summed,), (width,) = values.summed, values.only_right
    sizes = dict(zip(values.left_axes, attention.probabilities.shape))
    wanted = [*batch, summed, width]
    return arranged(draft, draft.program.origin, values.right, values.right_axes, wanted, sizes)


def _factors_of_probabilities(
    draft: Draft, factors: Sequence[tuple[int, Value]], steps: Sequence[BatchStep], v: Value
) -> tuple[list[Value], Value]:
    """Factors of a query are applied to its result, those of a key to its value."""
    outside = []
    for at, factor in factors:
        for step in steps[at:]:
            if not all(known(s == 1) for s in factor.shape[:-2]):
                raise Refused("a factor of probabilities whose axes change")
            factor = draft.reshape(factor, [*[1] * len(step.sizes or step.order or ()), *factor.shape[-2:]])
        if known(factor.shape[-1] == 1):
            outside.append(factor)
        else:
            v = _scaled(draft, v, _transposed(draft, factor))
    return outside, v


def _batch_before_merge(attention: Attention, below: ProbabilityPlan) -> list[Any] | None:
    """The sizes of the batch axes after the softmax, if the views of the probabilities only merge them.

    After autograd such views surround every product. Then the values are reshaped to the axes of the scores, not the
    scores to those of the values: a mask that is the same for all heads would have to be copied for each. A factor that
    is applied after the merge has the merged axes; then the scores are reshaped to the axes of the values.
    """
    steps = below.steps
    if len(steps) != 1 or steps[0].sizes is None or any(steps_before for steps_before, _ in below.factors):
        return None
    shape = shape_of(attention.softmax)
    batch = [shape[d] for d in attention.scores.layout.batch]
    return batch if len(batch) > len(steps[0].sizes) else None


def _as_operand(draft: Draft, value: Value, attention: Attention, steps: Sequence[BatchStep]) -> Value:
    """Bias, mask, fills or sink, with the axes that Q, K and V have after the views of the probabilities."""
    for step in steps:
        if step.order is not None:
            value = apply_step(draft, value, step)
        elif all(known(s == 1) for s in value.shape[:-2]):
            value = draft.reshape(value, [*[1] * len(step.sizes or ()), *value.shape[-2:]])
        else:
            if step is not steps[0]:
                raise Refused("probabilities whose axes change twice")
            shape = shape_of(attention.softmax)
            value = draft.expand(value, [*[shape[d] for d in attention.scores.layout.batch], *value.shape[-2:]])
            value = apply_step(draft, value, step)
    return value


def _scaled(draft: Draft, value: Value, factor: Value) -> Value:
    scaled = draft.mul(value, factor)
    return scaled if scaled.dtype == value.dtype else draft.to(scaled, dtype=value.dtype)


def _transposed(draft: Draft, value: Value) -> Value:
    return draft.permute(value, [*range(value.rank - 2), value.rank - 1, value.rank - 2])


# ---- the call ----


def _call(
    draft: Draft,
    attention: Attention,
    operands: Sequence[Value],
    scores: ScorePlan,
    below: ProbabilityPlan,
    masks: Sequence[Value | None],
    outside: Sequence[Value],
    result_batch: Sequence[Any],
) -> AttentionPlan:
    """The call for queries, keys and values with the axes (batch, rows, columns), and (bias, keep, floor, sink)."""
    q, k, v = operands
    bias, keep, floor, sink = masks
    if not all(known_equal(x.shape[:-2], q.shape[:-2]) for x in operands):
        raise Refused("batch axes that do not line up")
    if not all(known(s >= 1) for s in (q.shape[-1], k.shape[-2])):
        raise Refused("there may be no keys, or keys without elements")
    batch = list(q.shape[:-2])
    narrow = _autocast(draft, q, k, v, scores)
    added = [m.dtype for m in (bias, floor, sink) if m is not None]
    dtype = float_kind(*([q.dtype, k.dtype, v.dtype] if narrow is None else [narrow]), *added)
    bias, floor, sink = (m if m is None or m.dtype == dtype else draft.to(m, dtype=dtype) for m in (bias, floor, sink))
    q, k, v = (four_axes(draft, x if narrow or x.dtype == dtype else draft.to(x, dtype=dtype), batch) for x in operands)
    bias, keep, floor, sink = (
        None if m is None else four_axes(draft, m, batch, broadcast=True) for m in (bias, keep, floor, sink)
    )
    rounded_to = narrow if narrow != dtype else None
    planner = MaskPlanner(draft, scores, below, attention.scores.dtype, dtype, rounded_to, sink)
    call = planner.masked(MaskedCall(q, k, v), bias, keep, floor)
    if call.finite_rows is not None and below.nan_is_zero and draft.program.is_training:
        raise Refused("NaN becomes zero where -inf may have been added to all of a row")
    q, k, v, scale = call.q, call.k, call.v, scores.scale
    if sink is not None:
        trains = draft.program.is_training and draft.wants_gradient(sink)
        require_quick_gradient(q.device, size_hint(q.shape[-1]), trains)
        further = planner.further_keys(call)
        k, v = with_zero_rows(draft, k, further), with_zero_rows(draft, v, further)
    if scale < 0:  # kernels take the maximum of the products before they scale them
        q, scale = draft.neg(q), -scale
    attn_mask = None if call.attn_mask is None else laid_out(draft, call.attn_mask, k.shape[-2])
    wide, may_have_kernel = v, _may_have_kernel(draft, q.device, attn_mask, below)
    if may_have_kernel:
        q, k, wide = for_kernel(draft, q, k, v)
    return AttentionPlan(
        attention,
        draft,
        q,
        k,
        wide,
        narrow or dtype,
        v,
        attn_mask,
        call.is_causal,
        may_have_kernel,
        call.hides_later,
        sink is None,
        below.dropout,
        scale,
        call.finite_rows,
        call.kept_rows,
        call.without_keys,
        call.key_gradient,
        below.nan_is_zero,
        outside,
        batch,
        result_batch,
        below.factor,
    )


def _may_have_kernel(draft: Draft, device: torch.device, attn_mask: Value | None, below: ProbabilityPlan) -> bool:
    """May there be a fused kernel? On a CPU there is none for dropout, and none for the gradient of a mask."""
    if device.type != "cpu":
        return True
    gradient = attn_mask is not None and draft.program.is_training and draft.wants_gradient(attn_mask)
    return not below.dropout and not gradient


def _autocast(draft: Draft, q: Value, k: Value, v: Value, scores: ScorePlan) -> torch.dtype | None:
    """The dtype to which autocast rounds the kernel's operands, as it did those of the products; None without it."""
    if not all(x.is_float for x in (q, k, v)):
        raise Refused("queries, keys or values that are not floating-point numbers")
    wide = torch.float64 in (q.dtype, k.dtype)
    narrow = None if wide else draft.program.autocast_dtype(draft.anchor, q.device)
    products = float_kind(q.dtype, k.dtype) if narrow is None else narrow
    if scores.product_dtype != products:
        raise Refused(f"products of {scores.product_dtype} would be made in {products}")
    return narrow
