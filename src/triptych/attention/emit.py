"""Third phase: a planned attention is inserted into the graph. Only this phase creates nodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..ir.facts import known_equal, same_layout, tensor_fact
from ..ir.program import ATEN, Value
from ..kernels.nan_rows import nan_rows
from ..rewrite.clones import copied_as
from ..rewrite.emit import Emitter
from ..rewrite.functions import in_aten, put
from .kernel import kernel
from .plan import AttentionPlan
from .rule import is_decomposed


def emit(op: Emitter, plan: AttentionPlan, same_strides: bool) -> Value:
    """The replacement of the product with the values; `same_strides`: with the strides that eager gives it."""
    q, k, wide, v, attn_mask, finite_rows, kept_rows, key_gradient, *factors = plan.draft.place(op, plan.values)
    assert q is not None and k is not None and v is not None
    causal = {"is_causal": True} if plan.is_causal else {}
    how = {"attn_mask": attn_mask, "dropout_p": plan.dropout, **causal, "scale": plan.scale}
    attend = functools.partial(kernel, op) if is_decomposed(op.program) else op.scaled_dot_product_attention
    result = attend(q, k, wide, **how)
    result = result if known_equal(result.shape[-1], v.shape[-1]) else op.slice(result, 3, 0, v.shape[-1])
    result = _nan_rows(op, plan, result, q, k)
    if key_gradient is not None:
        result = op.add(result, _in_dtype_of(op, key_gradient, result))
    result = _rows_without_keys(op, plan, result, v, finite_rows, kept_rows)
    result = _with_batch(op, result, plan.batch)
    for factor in factors:
        result = op.mul(result, factor)
    if plan.factor != 1:
        result = op.mul(result, plan.factor)
    old = tensor_fact(plan.attention.result)
    assert old is not None
    order = plan.attention.probabilities.layout.order
    if plan.attention.result is plan.attention.values.node or order != sorted(order):
        result = _added(op, plan, _axes_as_before(op, plan, _with_batch(op, result, plan.result_batch)))
    result = result if known_equal(result.shape, old.shape) else op.reshape(result, list(old.shape))
    result = result if result.dtype == old.dtype else op.to(result, dtype=old.dtype)
    if same_strides and not same_layout(old, tensor_fact(result.node)):  # type: ignore[arg-type]
        return copied_as(op, result, old)
    return result


def _with_batch(op: Emitter, result: Value, batch: Sequence[Any]) -> Value:
    wanted = [*batch, *result.shape[-2:]]
    return result if known_equal(wanted, result.shape) else op.reshape(result, wanted)


def _nan_rows(op: Emitter, plan: AttentionPlan, result: Value, q: Value, k: Value) -> Value:
    """Makes the rows NaN whose softmax is NaN in eager. The kernels of a CPU give 0 for some of them."""
    if q.device is None or q.device.type != "cpu":
        return result
    how: dict[str, Any] = {"hides_later": True} if plan.hides_later else {}
    how |= {} if plan.may_be_empty else {"may_be_empty": False}
    if op.program.dialect != ATEN:
        return op.call(torch.ops.triptych.nan_rows.default, result, q, k, **how)
    operands = [value.node for value in (result, q, k)]
    traced = in_aten(op, functools.partial(nan_rows, **how), operands)
    return Value(op.program, put(op, traced, operands))


def _rows_without_keys(
    op: Emitter, plan: AttentionPlan, result: Value, v: Value, finite_rows: Value | None, kept_rows: Value | None
) -> Value:
    """Gives fully masked rows the result that they have in eager."""
    is_training = op.program.is_training
    if finite_rows is not None:  # a factor instead of a `where`, so that gradients are NaN where eager's are
        result = op.mul(result, _one_or_nan(op, finite_rows, result))
    if kept_rows is not None:
        instead: Any = plan.without_keys
        if instead != 0.0 and is_training:  # only the gradient of the values is NaN
            instead = op.mul(op.mean(v, dim=[2], keepdim=True), _one_or_nan(op, kept_rows, result))
        result = op.where(kept_rows, result, instead)
    if plan.nan_is_zero:  # weights of zero: NaN and infinity in the values still give NaN
        nothing = op.mul(op.mean(v, dim=[2], keepdim=True), 0.0)
        result = op.where(op.all(op.isnan(result), dim=-1, keepdim=True), nothing, result)
    return result


def _one_or_nan(op: Emitter, rows: Value, like: Value) -> Value:
    return _in_dtype_of(op, op.where(rows, 1.0, math.nan), like)


def _in_dtype_of(op: Emitter, value: Value, like: Value) -> Value:
    return value if value.dtype == like.dtype else op.to(value, dtype=like.dtype)


def _axes_as_before(op: Emitter, plan: AttentionPlan, result: Value) -> Value:
    """From (batch, queries, width) to the axes of the product with the values."""
    values, layout = plan.attention.values, plan.attention.probabilities.layout
    batch = [values.left_axes[d] for d in layout.batch]
    (width,) = values.only_right
    if layout.query is None:
        result, axes = op.reshape(result, [*result.shape[:-2], result.shape[-1]]), [*batch, width]
    else:
        axes = [*batch, values.left_axes[layout.query], width]
    order = [axes.index(a) for a in values.result_axes]
    return result if order == sorted(order) else op.permute(result, order)


def _added(op: Emitter, plan: AttentionPlan, result: Value) -> Value:
    """Adds what a `baddbmm` or `addmm` adds to the product with the values, and multiplies by its alpha."""
    values = plan.attention.values
    result = result if values.alpha == 1 else op.mul(result, values.alpha)
    if values.added is None:
        return result
    return op.add(result, values.added if values.beta == 1 else op.mul(values.added, values.beta))
