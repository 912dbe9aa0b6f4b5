"""The call itself: what mask it takes, and what rows get of which all keys are masked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..cost import size_hint
from ..ir.facts import known, known_equal
from ..ir.gradients import may_require_grad
from ..ir.program import Program, Value
from ..ir.values import knowledge
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .masks import is_lower_triangle, keeps_a_key, levels, never_infinite, rounded
from .operands import for_kernel, four_axes, laid_out
from .probabilities import Probabilities, float_kind
from .scores import LOST_IN_FLOAT32, Scores
from .sinks import beside, further_keys, require_gain, with_zero_rows

ABSORBS = 4.0
"""A fill so low that numbers half as low are this far apart: scores added to such a number are lost in it."""


def attend(
    op: Emitter,
    program: Program,
    q: Value,
    k: Value,
    v: Value,
    scores: Scores,
    below: Probabilities,
    masks: Sequence[Value | None],
) -> Value:
    """softmax(scale * Q K^T + bias) V over (batch, queries, width), with the masks (bias, keep, floor, sink)."""
    bias, keep, floor, sink = masks
    sizes = [q.shape[:-2], k.shape[:-2], v.shape[:-2]]
    if not all(known_equal(s, sizes[0]) for s in sizes):
        raise Refused("batch axes that do not line up")
    if not all(known(s >= 1) for s in (q.shape[-1], k.shape[-2])):
        raise Refused("there may be no keys, or keys without elements")
    batch = list(q.shape[:-2])
    narrow = _autocast(op, q, k, v, scores)
    added = [m.dtype for m in (bias, floor, sink) if m is not None]
    dtype = float_kind(*([q.dtype, k.dtype, v.dtype] if narrow is None else [narrow]), *added)
    bias, floor, sink = (m if m is None or m.dtype == dtype else op.to(m, dtype=dtype) for m in (bias, floor, sink))
    q, k, v = (four_axes(op, x if narrow or x.dtype == dtype else op.to(x, dtype=dtype), batch) for x in (q, k, v))
    call = _Masked(op, program, q, k, v, scores, below, dtype, narrow)
    bias, keep, floor, call.sink = (
        None if m is None else four_axes(op, m, batch, broadcast=True) for m in (bias, keep, floor, sink)
    )
    call.mask(bias, keep, floor)
    k, v = call.k, call.v
    if call.sink is not None:
        require_gain(q.device, size_hint(q.shape[-1]), program.is_training and may_require_grad(call.sink.node))
        further = further_keys(k)
        k, v = with_zero_rows(op, k, further), with_zero_rows(op, v, further)
    scale = scores.scale
    if scale < 0:  # kernels take the highest product before they scale it
        call.q, scale = op.neg(call.q), -scale
    causal = {"is_causal": True} if call.is_causal else {}
    attn_mask = None if call.attn_mask is None else laid_out(op, call.attn_mask, k.shape[-2])
    q, k, wide = (
        for_kernel(op, call.q, k, v) if _may_have_kernel(program, q.device, attn_mask, below) else (call.q, k, v)
    )
    made = op.scaled_dot_product_attention(
        q, k, wide, attn_mask=attn_mask, dropout_p=below.dropout, **causal, scale=scale
    )
    made = made if known_equal(made.shape[-1], v.shape[-1]) else op.slice(made, 3, 0, v.shape[-1])
    made = call.corrected(made, v)
    wanted = [*batch, made.shape[-2], v.shape[-1]]
    return made if known_equal(wanted, made.shape) else op.reshape(made, wanted)


def _may_have_kernel(program: Program, device: torch.device, attn_mask: Value | None, below: Probabilities) -> bool:
    """On a CPU there is none for dropout, and none for the gradient of a mask."""
    if device.type != "cpu":
        return True
    gradient = attn_mask is not None and program.is_training and may_require_grad(attn_mask.node)
    return not below.dropout and not gradient


def _autocast(op: Emitter, q: Value, k: Value, v: Value, scores: Scores) -> torch.dtype | None:
    """What the kernel's operands are rounded to by autocast, as those of the products were."""
    if not all(x.is_float for x in (q, k, v)):
        raise Refused("queries, keys or values that are not floating-point numbers")
    narrow = op.program.autocast_dtype(op.anchor, q.device) if torch.float64 not in (q.dtype, k.dtype) else None
    products = float_kind(q.dtype, k.dtype) if narrow is None else narrow
    if scores.product_dtype != products:
        raise Refused(f"products of {scores.product_dtype} would be made in {products}")
    return narrow


def _broadcast(op: Emitter, values: Sequence[Value]) -> list[Value]:
    """The values, expanded to the shape that all of them broadcast to."""
    shapes = [v.shape for v in values]
    whole = [next((s for s in sizes if not known(s == 1)), 1) for sizes in zip(*shapes)]
    return [v if known_equal(v.shape, whole) else op.expand(v, whole) for v in values]


class _Masked:
    """The mask of one call, and what it asks of queries, keys, values and result."""

    def __init__(
        self,
        op: Emitter,
        program: Program,
        q: Value,
        k: Value,
        v: Value,
        scores: Scores,
        below: Probabilities,
        dtype: torch.dtype,
        narrow: torch.dtype | None,
    ) -> None:
        self.op, self.program, self.scores, self.below = op, program, scores, below
        self.q, self.k, self.v = q, k, v
        self.dtype, self.rounded_to = dtype, narrow if narrow != dtype else None
        """In which the mask is made, and what autocast rounds it to."""
        self.know = knowledge(program)
        self.sink: Value | None = None
        self.attn_mask: Value | None = None
        self.is_causal = False
        self.finite_rows: Value | None = None
        """Which queries have a key whose bias is not -inf; the others are NaN, and so are their gradients."""
        self.kept_rows: Value | None = None
        """Which queries have a key that the mask keeps."""
        self.without_keys: Any = math.nan
        """What the others get."""

    @property
    def square(self) -> bool:
        return known_equal(self.q.shape[-2], self.k.shape[-2])

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
            zero = self.op.full([], 0.0, dtype=self.dtype, device=self.q.device)
            if bias is None:  # and a sink, which every row keeps
                self._bias(self.op.where(keep, zero, -math.inf))
            elif self.scores.cut_by_sum:
                self._bias(self.op.add(bias, self.op.where(keep, zero, -math.inf)))
            else:
                filled = -math.inf if floor is None else floor
                self._bias(self.op.where(keep if self.sink is not None else self._kept(keep), bias, filled))
        else:
            self._keep_and_bias(keep, bias, floor)
        if self.rounded_to is not None and self.attn_mask is not None and self.attn_mask.is_float:
            self.attn_mask = self._rounded(self.attn_mask, self.rounded_to)

    def _rounded(self, bias: Value, dtype: torch.dtype) -> Value:
        """As autocast would round it, and yet no row is lost: what is far below the highest of a row has no weight, and
        so it is the distance from there that is rounded."""
        op, held = self.op, levels(self.program, bias.node)
        if held is None or len(held - {0.0}) > 1:
            highest = op.amax(op.detach(bias), dim=[-1], keepdim=True)
            bias = op.sub(bias, op.where(op.gt(highest, -math.inf), highest, 0.0))
        elif any(math.isfinite(n) and math.isinf(rounded(n, dtype)) for n in held):
            bias = op.clamp(bias, min=torch.finfo(dtype).min)
        return op.to(bias, dtype=dtype)

    def _bias(self, bias: Value) -> None:
        """As it is; a row that is -inf everywhere gives NaN in eager, which the kernels do not say."""
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
            self.finite_rows = self.op.lt(self.op.abs(self._highest(bias)), math.inf)
        if self._may_sink(bias):
            self._raise(bias, self._sunk(bias), gradient=not self.scores.filled_by_bias)

    def _may_sink(self, bias: Value) -> bool:
        """Could a row be so low everywhere that its products are lost in it, and the kernel not do the same?

        In half precision they are lost earlier than in the kernel, which adds in float32; and the backward kernels
        take the sum of a row from a logarithm, which is lost in such low numbers too.
        """
        held = levels(self.program, bias.node)
        if held is not None and all(n > self._depth for n in held):
            return False
        if self.program.is_training:
            return True
        same_in_kernel = self.scores.summed_in in (torch.float32, torch.float64) and self.rounded_to is None
        return not same_in_kernel and not (held is not None and all(n == 0 or n < LOST_IN_FLOAT32 for n in held))

    @property
    def _depth(self) -> float:
        return -2 * ABSORBS / torch.finfo(self.scores.summed_in).eps

    def _sunk(self, bias: Value) -> Value:
        return self.op.lt(self._highest(bias), self._depth)

    def _highest(self, bias: Value) -> Value:
        highest = self.op.amax(self.op.detach(bias), dim=[-1], keepdim=True)
        return highest if self.sink is None else self.op.maximum(highest, self.op.detach(self.sink))

    def _any(self, rows: Value, low: float) -> Value:
        """Which queries have a key of which it is true, or a sink that is not as low."""
        found = self.op.any(rows, dim=-1, keepdim=True)
        return found if self.sink is None else self.op.logical_or(found, self.op.gt(self.sink, low))

    def _with_sink(self, bias: Value | None) -> Value | None:
        if self.sink is None:
            return bias
        return beside(self.op, bias, self.sink, self.k.shape[-2], further_keys(self.k))

    def _raise(self, bias: Value, sunk: Value, gradient: bool = True) -> None:
        """Rows that are low everywhere: their products count nothing, their bias counts from its highest."""
        op = self.op
        assert self.attn_mask is not None
        self.attn_mask = op.sub(self.attn_mask, op.where(sunk, self._highest(bias), 0.0))
        idle: Any = 0.0
        if gradient and self.program.is_training:  # no value, and yet a gradient, as eager has it
            idle = op.sub(self.q, op.detach(self.q))
        self.q = op.where(sunk, idle, self.q)

    def _keep(self, keep: Value) -> None:
        op = self.op
        if self.square and known_equal(keep.shape[-2:], [self.q.shape[-2], self.k.shape[-2]]):
            if self.know.is_causal(keep.node):
                self.is_causal = True
                return
        if self.below.empty_rows_are_zero or self.scores.fills == {-math.inf}:
            self.attn_mask = self._kept(keep)
            return
        self.attn_mask = keep
        if not self.know.every_row_keeps_one(keep.node):  # all keys are filled alike: so they weigh alike
            rows = op.any(keep, dim=-1, keepdim=True)
            self.q = op.where(rows, self.q, 0.0)
            self.attn_mask = op.logical_or(keep, op.logical_not(rows))

    def _kept(self, keep: Value) -> Value:
        """The mask for the kernel, which need not see rows without a key: what they get is chosen afterwards."""
        if self.know.every_row_keeps_one(keep.node):
            return keep
        rows = self.op.any(keep, dim=-1, keepdim=True)
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
        return self.op.logical_or(keep, self.op.logical_not(rows))

    def _keep_and_bias(self, keep: Value, bias: Value | None, floor: Value | None) -> None:
        """Filled with finite numbers beside a bias: rows whose kept keys are all as low as the filled ones weigh
        them together, and there the products are lost in such low numbers; so their queries are set to zero."""
        op, dtype = self.op, self.dtype
        finite = [f for f in self.scores.fills if f != -math.inf]
        highest = max(finite)
        spacing = torch.finfo(self.scores.dtype).eps * -highest / 2
        if bias is not None and (spacing < ABSORBS or len(finite) != len(self.scores.fills)):
            raise Refused(f"a mask that fills with {highest} beside a bias that may be as low")
        if self.below.empty_rows_are_zero:
            raise Refused("probabilities are set to zero beside a bias")
        lowest = torch.finfo(dtype).min
        filled: Any = floor if floor is not None else max(highest, lowest)
        if bias is None:
            rows = self._any(keep, highest / 2)
            bias = op.full([], 0.0, dtype=dtype, device=self.q.device)
        else:
            rows = self._any(op.logical_and(keep, op.gt(bias, highest / 2)), highest / 2)
        made = op.where(keep, bias, filled)
        made = made if made.dtype == dtype else op.to(made, dtype=dtype)
        self.attn_mask = self._with_sink(made)
        if not self.know.every_row_keeps_one(keep.node) or self.scores.bias is not None:
            self.finite_rows = self._any(op.gt(made, -math.inf), -math.inf)
            # a row that is -inf everywhere is NaN, and so is the gradient of its query
            self._raise(made, op.logical_and(op.logical_not(rows), self.finite_rows), gradient=False)

    def _keep_fills(self, keep: Value, bias: Value | None, floor: Value | None) -> None:
        """Fills that may have weight: a key that is masked for all queries becomes zero, so that its score is the
        fill, which is added. If queries differ in their masks, each key is there twice, once as it is and once as
        zero, and the mask leaves one of the two to each query."""
        op, dtype, lowest = self.op, self.dtype, min(self.scores.fills)
        if lowest < torch.finfo(dtype).min and lowest != -math.inf:
            raise Refused(f"{dtype} does not hold {lowest}, which scores are filled with")
        kept: Any = op.full([], 0.0, dtype=dtype, device=self.q.device) if bias is None else bias
        filled: Any = op.full([], lowest, dtype=dtype, device=self.q.device) if floor is None else floor
        self.scores.filled_by_bias = True
        if known(keep.shape[-2] == 1):
            keys = op.permute(keep, [0, 1, 3, 2])
            self.k = op.where(keys, self.k, 0.0)
            if self.below.empty_rows_are_zero:
                self.v = op.where(keys, self.v, 0.0)
            return self._bias(self._lifted(op.where(keep, kept, filled), keep))
        cut = op.full([], -math.inf, dtype=dtype, device=self.q.device)
        count = self.k.shape[-2]
        parts = [op.where(keep, kept, cut), op.where(keep, cut, filled)]
        wide = [p if known_equal(p.shape[-1], count) else op.expand(p, [*p.shape[:-1], count]) for p in parts]
        self.k = with_zero_rows(op, self.k, count)
        twice = not self.below.empty_rows_are_zero
        self.v = op.cat([self.v, self.v], dim=-2) if twice else with_zero_rows(op, self.v, count)
        return self._bias(self._lifted(op.cat(_broadcast(op, wide), dim=-1), keep))

    def _lifted(self, mask: Value, keep: Value) -> Value:
        """A row without a key counts from its highest fill: the backward kernels would round by its size otherwise."""
        if not self.program.is_training or self.sink is not None or self.know.every_row_keeps_one(keep.node):
            return mask
        highest = self._highest(mask)
        dead = self.op.logical_and(self.op.logical_not(self._any(keep, 0.0)), self.op.gt(highest, -math.inf))
        return self.op.sub(mask, self.op.where(dead, highest, 0.0))

    def corrected(self, made: Value, v: Value) -> Value:
        op = self.op
        if self.finite_rows is not None:  # a factor, and not a choice: so that the gradients are NaN where eager's are
            if self.below.nan_is_zero and self.program.is_training:
                raise Refused("NaN becomes zero where -inf may have been added to all of a row")
            made = op.mul(made, self._one_or_nan(self.finite_rows, made))
        if self.kept_rows is not None:
            instead = self.without_keys
            if instead != 0.0 and self.program.is_training:  # the gradient of the values is NaN, and theirs alone
                instead = op.mul(op.mean(v, dim=[2], keepdim=True), self._one_or_nan(self.kept_rows, made))
            made = op.where(self.kept_rows, made, instead)
        if self.below.nan_is_zero:  # weights of zero, which NaN and infinity in the values show all the same
            nothing = op.mul(op.mean(v, dim=[2], keepdim=True), 0.0)
            made = op.where(op.all(op.isnan(made), dim=-1, keepdim=True), nothing, made)
        return made

    def _one_or_nan(self, rows: Value, like: Value) -> Value:
        factor = self.op.where(rows, 1.0, math.nan)
        return factor if factor.dtype == like.dtype else self.op.to(factor, dtype=like.dtype)
