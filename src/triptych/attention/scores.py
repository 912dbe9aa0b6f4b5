"""From a product of queries and keys down to their softmax: what is added, multiplied and masked on the way."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .choices import Choice, choice, kept_by
from .layout import VIEWS, BatchStep, Layout, aligned, padded, reshaped_along, viewed
from .masks import MARGIN, MASKS, is_number, negation, never_infinite, one_number, rounded
from .sinks import joined_with_sink, refuse_beside_sink, sink_column

LOST_IN_FLOAT32 = -1e8
"""So low that a score added to it is lost."""
STILL_NEGLIGIBLE = -1e3
"""A fill that was negligible and was scaled, as the other scores were, may be as high as this."""


@dataclass(frozen=True)
class Gate:
    """Zeros and ones that the scores were multiplied with: a mask, once something low is added where they are zero."""

    node: Node
    by: Choice
    factor: tuple[int, Value]
    layout: Layout
    before: Value | None
    """The bias as it was before."""
    after: Value | None


@dataclass
class Scores:
    """`scale * Q K^T + bias`, less what is masked, as far as it was followed."""

    program: Program
    op: Emitter
    layout: Layout
    shape: Sequence[Any]
    product_dtype: torch.dtype
    dtype: torch.dtype
    lowest_score: float = -math.inf
    """The scores that no mask covers are said to lie above this."""
    scale: float = 1.0
    steps: list[BatchStep] = field(default_factory=list)
    factors: list[tuple[int, Value]] = field(default_factory=list)
    """Tensors the scores are multiplied with, (batch, queries, keys), each with the number of steps made before."""
    bias: Value | None = None
    keep: Value | None = None
    """Where a score counts; as broad as it must be to be broadcast to the scores."""
    fills: set[float] = field(default_factory=set)
    """What stands where it does not, as it was filled in and scaled since."""
    floor: Value | None = None
    """The same as a tensor, if it is not one number."""
    fills_count: bool = False
    """A score that no mask covers may be as low as what is filled in: then masked keys have weight."""
    sink: Value | None = None
    """A further column of scores, which has no key."""
    sink_is_first: bool = False
    shifted: bool = False
    """A number was added to all scores of a row, and left out."""
    undefined: bool = False
    """Of a row that may have been -inf everywhere: it is NaN in eager, whatever it is filled with in places."""
    uneven: list[tuple[int, Value]] = field(default_factory=list)
    """Factors that may vary with the key, of scores that were shifted: what was left out would vary too."""
    masks: list[tuple[Node, bool]] = field(default_factory=list)
    """Each mask, and whether it is true where a score is masked."""
    gates: list[Gate] = field(default_factory=list)
    filled_by_bias: bool = False
    """What was filled in or cut off is in the bias: where it is all of a row, no gradient reaches the scores."""
    cut_by_sum: bool = False
    """The mask is -inf that was added: what is NaN by it, all its gradients are."""
    summed_in: torch.dtype = torch.float32
    """The dtype in which scores and bias were added."""
    covered: list[Node] = field(default_factory=list)
    constants: list[Node] = field(default_factory=list)
    """What the last mask filled in."""

    def follow(self, node: Node, scores: Node) -> None:
        """One operation further down; `scores` is the operand that is followed."""
        call = self.program.call(node)
        result = tensor_fact(node)
        assert call is not None and result is not None
        if call.op in VIEWS:
            self._view(node, scores, list(result.shape))
        else:
            getattr(self, f"_{call.op}")(call, scores)
        self.covered.append(node)
        while self.constants and all(u in self.covered for u in self.constants[0].users):  # nobody else's
            self.covered.append(self.constants.pop(0))
        self.constants.clear()
        self.shape = list(result.shape)
        self.cast(result.dtype)
        if call.op in ("add", "sub"):
            self.summed_in = result.dtype

    # ---- arithmetic ----

    def cast(self, dtype: torch.dtype) -> None:
        """What the scores are rounded to, what was added to them and filled in is rounded to as well."""
        if dtype == self.dtype:
            return
        if not dtype.is_floating_point:
            raise Refused("the scores become another kind of number")
        if torch.finfo(dtype).max < torch.finfo(self.product_dtype).max * 0.99:
            raise Refused(f"scores of {self.product_dtype} may overflow in {dtype}")
        if torch.finfo(dtype).eps > torch.finfo(self.dtype).eps:
            self.bias, self.floor, self.sink = (
                v if v is None or v.dtype == dtype else self.op.to(v, dtype=dtype)
                for v in (self.bias, self.floor, self.sink)
            )
            self.fills = {rounded(f, dtype) for f in self.fills}
        self.dtype = dtype

    def _to(self, call: Call, scores: Node) -> None:
        if call.get("device") is not None or call.get("layout") is not None:
            raise Refused("the scores go to another device")

    def _clone(self, call: Call, scores: Node) -> None:
        """The same scores."""

    def _neg(self, call: Call, scores: Node) -> None:
        self.times(-1.0)

    def _add(self, call: Call, scores: Node, sign: float = 1.0) -> None:
        alpha = call.get("alpha")
        if not is_number(alpha) or isinstance(alpha, Node):
            raise Refused("a sum times something that is not a number")
        first, second = call.args["self"], call.args["other"]
        if first is second:
            raise Refused("scores are added to themselves")
        if first is scores:
            self.plus(second, sign * alpha)
        else:
            self.times(sign * alpha)
            self.plus(first)

    def _sub(self, call: Call, scores: Node) -> None:
        first, second = call.args["self"], call.args["other"]
        if call.get("alpha") == 1 and first is scores and self._takes_own_maximum(second, scores):
            return
        if call.get("alpha") == 1 and second is scores and self._takes_own_maximum(first, scores):
            return self.times(-1.0)
        return self._add(call, scores, -1.0)

    def _mul(self, call: Call, scores: Node) -> None:
        other = call.args["other"] if call.args["self"] is scores else call.args["self"]
        if other is scores:
            raise Refused("scores squared")
        self.factor(other)

    def _div(self, call: Call, scores: Node) -> None:
        if call.args["self"] is not scores or call.get("rounding_mode") is not None:
            raise Refused("something is divided by the scores, or rounded")
        other = call.args["other"]
        if other is scores:
            raise Refused("scores divided by themselves")
        if isinstance(other, Node):
            self.factor(other, divide=True)
        else:
            self.times(1.0 / other if other else math.inf)

    def times(self, number: float) -> None:
        number = float(number)
        if not math.isfinite(number) or number == 0:
            raise Refused(f"scores are multiplied by {number}")
        if number < 0 and self.keep is not None:
            raise Refused("masked scores are multiplied by a negative number")
        self.scale *= number
        if not math.isfinite(self.scale) or self.scale == 0:
            raise Refused(f"a scale of {self.scale}")
        if number == 1:
            return
        self.fills = {rounded(f * number, self.dtype) for f in self.fills}
        if any(f > STILL_NEGLIGIBLE for f in self.fills):
            raise Refused("masked scores are scaled until they may count beside others")
        self.bias, self.floor, self.sink = (
            None if v is None else self.op.mul(v, number) for v in (self.bias, self.floor, self.sink)
        )

    def factor(self, other: Any, divide: bool = False) -> None:
        if not isinstance(other, Node):
            if not is_number(other):
                raise Refused("an unknown factor")
            return self.times(other)
        if (found := one_number(self.program, other)) is not None:
            number = found[0]
            return self.times(number if not divide else 1 / number if number else math.inf)
        refuse_beside_sink(self.sink)
        value = Value(self.program, other)
        if (parts := self._per_query_and_key(value)) is not None:
            for part in parts:
                self.factor(part, divide)
            return None
        if self.keep is not None:
            self._mask_by_bias()
        if is_number(other):
            value = self.op.call(operator.truediv, 1, value) if divide else value
        elif value.is_float:
            value = self.op.rdiv(value, 1) if divide else value
        else:
            raise Refused("a factor that is not a floating-point number")
        before, by = self.bias, None if divide else choice(self.program, other)
        self.factors.append((len(self.steps), value if value.rank in (None, 0) else self.aligned(value)))
        if self.shifted and value.rank and not known(self.factors[-1][1].shape[-1] == 1):
            self.uneven.append(self.factors[-1])
        if self.bias is not None:
            self.bias = self.op.mul(self.bias, Value(self.program, other) if not divide else value)
        if by is not None and by.is_mask:
            self.gates.append(Gate(other, by, self.factors[-1], self.layout, before, self.bias))
        return None

    def _per_query_and_key(self, value: Value) -> list[Node] | None:
        """A factor that varies with query and key, and is the product of two that do not: the norms of each."""
        if not value.is_tensor or not value.rank:
            return None
        shape = [1] * (self.layout.rank - value.rank) + list(value.shape)
        own = [d for d in (self.layout.query, self.layout.key) if d is not None and not known(shape[d] == 1)]
        call = self.program.call(value.node)
        if len(own) < 2 or call is None or call.op != "mul" or call.mutates:
            return None
        parts = [call.args["self"], call.args["other"]]
        facts = [tensor_fact(p) for p in parts]
        if any(f is None or known_equal(f.shape, value.shape) or not f.dtype.is_floating_point for f in facts):
            return None
        return parts

    def _mask_by_bias(self) -> None:
        """Masked scores times what is not known at compile time: what was filled in is scaled as well, and may be
        anything afterwards. It is added instead, since the scores below are lost in numbers that low."""
        if self.fills_count or any(f > LOST_IN_FLOAT32 for f in self.fills):
            raise Refused("masked scores are multiplied by a tensor, after which they may count beside others")
        assert self.keep is not None
        filled: Any = self.floor if self.floor is not None else min(self.fills)
        rest = self.op.full([], 0.0, dtype=self.dtype, device=self.keep.device) if self.bias is None else self.bias
        rest = self._able_to_hold(rest, min(self.fills))
        self.bias = self.op.where(self.keep, rest, filled)
        self.keep, self.floor, self.fills, self.masks = None, None, set(), []
        self.filled_by_bias = True

    def plus(self, other: Any, times: float = 1.0) -> None:
        if not isinstance(other, Node):
            if not is_number(other) or not math.isfinite(other) or not math.isfinite(times):
                raise Refused(f"{other} is added to the scores")
            return self._shift()
        if is_number(other):
            return self._shift()
        refuse_beside_sink(self.sink)
        value = Value(self.program, other)
        if not value.is_tensor or value.dtype.is_complex or not math.isfinite(times) or times == 0:
            raise Refused("an unknown bias")
        if self._closes_a_gate(value, times):
            return
        if not value.is_float or value.rank == 0:  # these do not widen the scores
            value = value if value.dtype == self.dtype else self.op.to(value, dtype=self.dtype)
        value = value if times == 1 else self.op.neg(value) if times == -1 else self.op.mul(value, times)
        if self.fills - {-math.inf} or (self.fills and not never_infinite(self.program, value.node)):
            fill = min(self.fills)  # -inf becomes NaN where infinity is added
            low, other = (self.floor, value) if self.floor is not None else (self._able_to_hold(value, fill), fill)
            self.floor = self.op.add(low, other)
        self.bias = value if self.bias is None else self.op.add(self.bias, value)

    def _closes_a_gate(self, value: Value, times: float) -> bool:
        """s * m + (m - 1) * 1e9 -> where(m, s, -1e9), if m is proved to hold zeros and ones"""
        added = choice(self.program, value.node) if self.gates and self.keep is None else None
        for gate in self.gates if added is not None and value.rank else ():
            seen_since = gate.factor[0] != len(self.steps) or gate.layout != self.layout
            if seen_since or added is None or not gate.by.same_places(self.program, added):
                continue
            kept, cut = (added.high, added.low) if gate.by.high == 1 else (added.low, added.high)
            cut = rounded(cut * times, torch.promote_types(self.dtype, value.dtype))
            if kept != 0 or not cut <= MASKS:
                continue
            self.factors = [f for f in self.factors if f is not gate.factor]
            self._compare_fill(cut)
            self.gates.clear()
            if self.bias is gate.after:
                self.bias = gate.before
            elif cut != -math.inf and self.bias is not None:  # what was added in between stays where the mask is
                self.floor = self.op.add(self._able_to_hold(self.bias, cut), cut)
            self.keep, self.fills = kept_by(self.op, gate.node), {cut}
            self.masks.append((self.keep.node, False))
            self.cut_by_sum = cut == -math.inf
            return True
        return False

    def _takes_own_maximum(self, other: Any, scores: Node) -> bool:
        """Less the highest score over the keys, kept as an axis: that changes no softmax."""
        nodes: list[Node] = []
        while isinstance(other, Node) and (call := self.program.call(other)) is not None and not call.mutates:
            nodes.append(other)
            if call.op in ("detach", "expand", "expand_as") or (call.op == "getitem" and call.args["index"] == 0):
                other = call.args["self"]
                continue
            if call.op not in ("amax", "max") or call.args.get("self") is not scores or "other" in call.args:
                return False
            dim = call.get("dim")
            dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
            whole = dims in ([], [None])
            if not whole and (dims != [self.layout.key] or call.get("keepdim") is not True):
                return False
            self.covered.extend(nodes)
            self._shift()
            low = self.bias is not None and not never_infinite(self.program, self.bias.node)
            self.undefined = self.undefined or low or -math.inf in self.fills
            return True
        return False

    def _shift(self) -> None:
        """One number more or less for all scores of a row: the softmax is the same, but for a sink put beside them."""
        self.shifted = self.shifted or self.sink is None

    def _maximum(self, call: Call, scores: Node) -> None:
        other = call.args.get("other")
        self._not_below(other if call.args["self"] is scores else call.args["self"])

    _max = _maximum

    def _clamp(self, call: Call, scores: Node) -> None:
        highest = one_number(self.program, call.get("max")) if call.get("max") is not None else (math.inf, [])
        if highest is None or rounded(highest[0], self.dtype) < torch.finfo(self.dtype).max:
            raise Refused("the scores are cut off above")
        if call.get("min") is not None:
            self._not_below(call.args["min"])

    def _not_below(self, lowest: Any) -> None:
        """Cut off at the lowest number of the dtype: that changes -inf only, and so what was added or filled in."""
        refuse_beside_sink(self.sink)
        found = one_number(self.program, lowest)
        if found is None or math.isnan(found[0]) or rounded(found[0], self.dtype) > torch.finfo(self.dtype).min:
            raise Refused("the scores are cut off below")
        number = torch.finfo(self.dtype).min
        if rounded(found[0], self.dtype) < number:
            return
        self._refuse_undefined()
        self.fills = {max(f, number) for f in self.fills}
        self.filled_by_bias = True
        self.bias, self.floor = (
            v
            if v is None or never_infinite(self.program, v.node)
            else self.op.clamp(self._able_to_hold(v, number), min=number)
            for v in (self.bias, self.floor)
        )

    def _refuse_undefined(self) -> None:
        if self.undefined:
            raise Refused("scores that were shifted by -inf are raised again")

    def _able_to_hold(self, value: Value, number: float) -> Value:
        """Scores that were widened leave what was added before as narrow as it was; a low number may be -inf there."""
        overflows = math.isfinite(number) and math.isinf(rounded(number, value.dtype))
        return self.op.to(value, dtype=self.dtype) if overflows else value

    # ---- masks ----

    def _masked_fill(self, call: Call, scores: Node) -> None:
        self._mask(call.args["mask"], True, call.args["value"])

    def _where(self, call: Call, scores: Node) -> None:
        kept = call.args["self"] is scores
        if kept and call.args["other"] is scores:
            raise Refused("a choice between the scores and themselves")
        self._mask(call.args["condition"], not kept, call.args["other" if kept else "self"])

    def _cat(self, call: Call, scores: Node) -> None:
        """A sink beside the scores."""
        found = joined_with_sink(self.program, call)
        if found is None or found.scores is not scores or found.dim != self.layout.key or found.sink is scores:
            raise Refused("scores are joined with others")
        refuse_beside_sink(self.sink)
        if self.shifted:
            raise Refused("a sink stands beside scores that were shifted")
        dtype = torch.promote_types(self.dtype, Value(self.program, found.sink).dtype)
        self.sink, self.sink_is_first = sink_column(self.op, self.program, found, dtype), found.first

    def _mask(self, mask: Any, masks_out: bool, fill: Any) -> None:
        refuse_beside_sink(self.sink)
        found = one_number(self.program, fill)
        if found is None or not found[0] <= MASKS:
            raise Refused(f"scores are filled with {fill}, which may count beside others")
        condition = Value(self.program, mask)
        if condition.dtype != torch.bool:
            raise Refused("a mask that is not boolean")
        if self.cut_by_sum:
            raise Refused("scores are masked again after -inf was added to them")
        number, nodes = rounded(found[0], self.dtype), found[1]
        if number != -math.inf:
            self._refuse_undefined()
        self._compare_fill(number)
        self.constants.extend(nodes)
        self.masks.append((mask, masks_out))
        plain, negated = negation(self.program, mask)
        condition = Value(self.program, plain)
        keep = self.op.logical_not(condition) if masks_out ^ negated else condition
        if self.keep is None:
            self.keep, self.fills = keep, {number}
            return
        if self.floor is not None or self.fills != {number}:  # the later fill covers the earlier
            earlier = self.floor if self.floor is not None else self.op.full([], min(self.fills), dtype=self.dtype)
            self.floor = self.op.where(keep, self._able_to_hold(earlier, number), number)
            self.fills |= {number}
        self.keep = self.op.logical_and(self.keep, keep)

    def _compare_fill(self, number: float) -> None:
        """Could a score that the mask does not cover be as low as what is filled in?"""
        if number <= max(torch.finfo(self.dtype).min, 2 * self.lowest_score):
            return
        if self.bias is None and not self.factors and not self.shifted:
            lowest = torch.finfo(self.product_dtype).min * abs(self.scale)
            if number <= lowest - MARGIN:
                return
        if self.shifted:
            raise Refused(f"scores that were shifted are filled with {number}, which may count beside others")
        self.fills_count = True

    # ---- views ----

    def _view(self, node: Node, before: Node, shape: Sequence[Any]) -> None:
        call = self.program.call(node)
        assert call is not None
        self.layout, step = viewed(self.program, self.layout, before, node)
        self.steps += [step] if step is not None else []
        rank, old = len(self.shape), self.shape

        def moved(value: Value | None) -> Value | None:
            if value is None:
                return None
            if call.op == "permute":
                return self.op.permute(padded(self.op, value, rank), call.args["dims"])
            return reshaped_along(self.op, value, old, shape)

        self.bias, self.keep, self.floor, self.sink = map(moved, (self.bias, self.keep, self.floor, self.sink))

    def aligned(self, value: Value) -> Value:
        """What is broadcast to the scores as they are now, its axes in the order (batch, queries, keys)."""
        return aligned(self.op, value, self.layout)
