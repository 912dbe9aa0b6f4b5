"""From a softmax down to its product with the values: casts, dropout, views, factors, and zeros where the mask was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import NotConcerned, Refused
from .choices import choice
from .contraction import contraction_of
from .layout import VIEWS, BatchStep, Layout, aligned, viewed
from .masks import is_number, negation, one_number, same_value
from .scores import Scores
from .sinks import drops_sink

BELOW = ("to", "clone", "dropout", "masked_fill", "where", "mul", "div", "slice", "nan_to_num", *VIEWS)


def way_down(program: Program, softmax: Node) -> tuple[list[Node], Node]:
    """The operations between the softmax and the product with the values, and that product."""
    node = softmax
    passed: list[Node] = []
    while True:
        users = list(node.users)
        if len(users) != 1:
            if any(contraction_of(program, u) is not None for u in users):
                raise Refused(f"the probabilities {node.name} are used {len(users)} times")
            raise NotConcerned("no product with values follows")
        before, node = node, users[0]
        if contraction_of(program, node) is not None:
            return passed, node
        call = program.call(node)
        if call is None or call.mutates or call.op not in BELOW:
            after = any(contraction_of(program, u) is not None for u in node.users)
            if call is not None and after and tensor_fact(node) is not None:
                raise Refused(f"{call.op} stands between the softmax and the product with the values")
            raise NotConcerned("no product with values follows")
        operands = [call.args.get(k) for k in ("self", "input", "other")]
        if sum(o is before for o in operands) != 1 or (call.op == "div" and operands[0] is not before):
            raise NotConcerned("no product with values follows")
        passed.append(node)


def goes_into_product(program: Program, softmax: Node) -> bool:
    """Does a product with values follow, with nothing in between that is not understood?"""
    try:
        way_down(program, softmax)
    except Refused:
        return False
    return True


@dataclass
class Probabilities:
    """Softmax of the scores, as far as it was followed."""

    program: Program
    op: Emitter
    layout: Layout
    scores: Scores
    draws: bool
    dropout: float = 0.0
    empty_rows_are_zero: bool = False
    sink_is_dropped: bool = False
    nan_is_zero: bool = False
    factor: float = 1.0
    steps: list[BatchStep] = field(default_factory=list)
    factors: list[tuple[int, Value]] = field(default_factory=list)
    """As those of the scores: they go to the result or to the values."""

    def follow(self, node: Node, before: Node) -> None:
        call = self.program.call(node)
        old, new = tensor_fact(before), tensor_fact(node)
        assert call is not None and old is not None and new is not None
        if not new.dtype.is_floating_point or new.device != old.device:
            raise Refused("the probabilities become another kind of number, or go to another device")
        if call.op in VIEWS:
            self.layout, step = viewed(self.program, self.layout, before, node)
            self.steps += [step] if step is not None else []
            return
        if call.op == "slice":
            return self._drop_sink(call, old, new)
        if not known_equal(old.shape, new.shape):
            raise Refused("the probabilities are stretched")
        if call.op == "dropout":
            self._take_dropout(call)
        elif call.op == "masked_fill":
            self._take_zeros(call.args["mask"], True, call.args["value"])
        elif call.op == "where":
            kept = call.args["self"] is before
            self._take_zeros(call.args["condition"], not kept, call.args["other" if kept else "self"])
        elif call.op == "nan_to_num":
            self._take_no_nan(call)
        elif call.op in ("mul", "div"):
            other = call.args["other"] if call.args["self"] is before else call.args["self"]
            self._take_factor(call, other)

    def _drop_sink(self, call: Call, old: torch.Tensor, new: torch.Tensor) -> None:
        if self.scores.sink is None or self.sink_is_dropped:
            raise Refused("a part of the probabilities is taken")
        if not drops_sink(call, old, new, self.layout.key, self.scores.sink_is_first):
            raise Refused("more or less than the sink is left out of the probabilities")
        self.sink_is_dropped = True

    def _take_dropout(self, call: Call) -> None:
        rate, train = call.args["p"], call.get("train")
        if not isinstance(rate, (int, float)) or not isinstance(train, bool):
            raise Refused("a dropout rate that is not a number")
        if not train or not rate:
            return
        if not self.draws:
            raise Refused("dropout would draw other numbers than eager")
        if self.dropout or rate >= 1:
            raise Refused("dropout twice, or of everything")
        self.dropout = float(rate)

    def _take_zeros(self, mask: Any, masks_out: bool, value: Any) -> None:
        """Probabilities set to zero by the mask that the scores had: it changes rows without a key only."""
        number = one_number(self.program, value)
        if len(self.scores.masks) != 1 or number is None or number[0] != 0 or self.steps:
            raise Refused("probabilities are masked otherwise than the scores")
        ((own, own_masks_out),) = self.scores.masks
        (node, negated), (other, other_negated) = negation(self.program, mask), negation(self.program, own)
        if not same_value(self.program, node, other) or (masks_out ^ negated) != (own_masks_out ^ other_negated):
            raise Refused("probabilities are masked otherwise than the scores")
        self.empty_rows_are_zero = True

    def _take_no_nan(self, call: Call) -> None:
        """A softmax is NaN in a whole row or nowhere, and never infinite."""
        if call.get("nan") not in (None, 0) or self.factors or not math.isfinite(self.factor):
            raise Refused("NaN becomes another number than zero")
        self.nan_is_zero = True

    def _is_own_mask(self, other: Node) -> bool:
        """Multiplied by zeros and ones where the scores were masked: rows without a key become zero, or stay NaN."""
        by = choice(self.program, other) if len(self.scores.masks) == 1 and not self.steps else None
        own = choice(self.program, self.scores.masks[0][0]) if by is not None and by.is_mask else None
        if by is None or own is None or not own.is_mask or not by.same_places(self.program, own):
            return False
        if (by.high == own.high) == self.scores.masks[0][1]:
            return False
        self.empty_rows_are_zero = self.empty_rows_are_zero or -math.inf not in self.scores.fills
        return True

    def _take_factor(self, call: Call, other: Any) -> None:
        divide = call.op == "div"
        if divide and call.get("rounding_mode") is not None:
            raise Refused("probabilities are rounded")
        if not isinstance(other, Node):
            if not is_number(other) or (divide and other == 0):
                raise Refused("an unknown factor of the probabilities")
            self.factor = self.factor / other if divide else self.factor * other
            return
        value = Value(self.program, other)
        if not divide and self._is_own_mask(other):
            return
        if not value.is_float:
            raise Refused("a factor of the probabilities that is not a floating-point tensor")
        value = self.op.rdiv(value, 1) if divide else value
        value = aligned(self.op, value, self.layout)
        if self.scores.sink is not None and not self.sink_is_dropped and not known(value.shape[-1] == 1):
            raise Refused("a factor of the probabilities with a sink beside them")
        if not known(value.shape[-1] == 1) and not known(value.shape[-2] == 1):
            raise Refused("a factor of the probabilities that varies with query and key")
        self.factors.append((len(self.steps), value))


def float_kind(*dtypes: torch.dtype) -> torch.dtype:
    """The narrowest dtype that holds all values of these."""
    wide = dtypes[0]
    for dtype in dtypes[1:]:
        wide = torch.promote_types(wide, dtype)
    return wide
