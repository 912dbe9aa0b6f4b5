"""Numbers in scores so large that what is added to them is rounded more coarsely than a softmax rounds.

`exp(x - logsumexp(x))` is a softmax but for one rounding: logsumexp(x) = m + log(s), where m is the highest score of
the row and s, the sum of exp(x - m), is between 1 and the number n of keys. With u for half the distance from 1 to the
next number of the dtype, the rounding of the sum changes it by up to u * (|m| + log(n)), and multiplies every
probability of the row by exp of that. If a finite number fills a whole row, m is this number, and where
u * |m| > log(n) the logarithm is lost: every probability of the row is 1 instead of 1 / n.

A kernel for attention subtracts m instead. It computes in float32, where u = 2^-24, and scores below m - 128 have no
weight; so it rounds the operand of exp by up to 128 * 2^-24 = 2^-17. The rounding of logsumexp is no larger if
u * |m| <= 2^-17: up to 2^36 in float64 and 128 in float32. In float16 and bfloat16 even ordinary scores are rounded
more coarsely, so a number up to 128 passes for a score there. A number added to all scores rounds them in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.values import knowledge
from ..ir.values.choices import levels
from ..ir.values.knowledge import as_number
from .contraction import contraction_of
from .layout import VIEWS
from .masks import MARGIN

ROUNDING = MARGIN * 2.0**-24
SEARCHED = 40
"""Search budget: how many values above a softmax are examined."""

SAME_PLACES = ("to", "clone", "expand", "neg")
"""Operations behind which the last axis is still that of the keys."""


def largest(dtype: torch.dtype) -> float:
    """The largest number beside which scores are rounded no more coarsely than by a softmax."""
    return max(MARGIN, ROUNDING / (torch.finfo(dtype).eps / 2))


def is_large(number: float, dtype: torch.dtype) -> bool:
    return math.isfinite(number) and abs(number) > largest(dtype)


def lost_logarithm(program: Program, scores: Node, dim: int) -> Refusal | None:
    """Why logsumexp(scores) may be rounded too coarsely: numbers that may be all that is left in a row."""
    search = _Search(program, scores)
    search.run()
    if not search.large or search.keeps_one(dim):
        return None
    at, number = search.large[0]
    sentence = "{at} puts {found} into the scores: if a row has nothing else, its logarithm is lost in logsumexp"
    return Refusal(sentence, at=at, found="an unknown number" if number is None else f"{number:.4g}")


@dataclass
class _Search:
    """Goes up from the scores to the products that they are computed from."""

    program: Program
    scores: Node
    large: list[tuple[Node, float | None]] = field(default_factory=list)
    """The operations that put a large number into the scores, or one that is not known, and the number."""
    masks: list[Node] = field(default_factory=list)
    """The operations that mask scores or add something to them."""
    moved: set[Node] = field(default_factory=set)
    """Values whose last axis need not be that of the keys."""

    def run(self) -> None:
        work, seen = [self.scores], {self.scores}
        while work:
            node = work.pop()
            for operand in self._operands(node):
                if self._limit(operand) is None or operand in seen:
                    continue
                if len(seen) == SEARCHED:
                    self.large.append((node, None))
                    return
                seen.add(operand)
                work.append(operand)
                call = self.program.call(node)
                if node in self.moved or call is not None and call.op in VIEWS:
                    self.moved.add(operand)

    def _limit(self, value: Any) -> float | None:
        """The largest number that may stand in a value; None if it is no tensor of floating-point numbers."""
        tensor = tensor_fact(value)
        return largest(tensor.dtype) if tensor is not None and tensor.dtype.is_floating_point else None

    def _operands(self, node: Node) -> list[Any]:
        """The operands that the scores come from; notes the numbers among the others."""
        product = contraction_of(self.program, node)
        if product is not None:
            return [product.added] if product.added is not None and not self._is_known(node, product.added) else []
        call = self.program.call(node)
        if call is None or call.mutates:
            return []
        if call.op in ("masked_fill", "where"):
            return self._filled(node, call)
        if call.op in ("add", "sub", "rsub", "mul", "div", "maximum", "max", "clamp"):
            if call.op in ("add", "sub", "rsub"):
                self.masks.append(node)
            values = [call.args[name] for name in ("self", "other", "min") if call.args.get(name) is not None]
            return [value for value in values if not self._is_known(node, value)]
        if call.op == "cat":
            return list(call.args["tensors"])
        return [call.args["self"]] if call.op in (*SAME_PLACES, *VIEWS) else []

    def _filled(self, node: Node, call: Call) -> list[Any]:
        self.masks.append(node)
        names = ("self", "value") if call.op == "masked_fill" else ("self", "other")
        unknown = [call.args[name] for name in names if not self._is_known(node, call.args.get(name))]
        for value in unknown:
            tensor = tensor_fact(value)
            if tensor is None or tensor.dim() == 0:
                self.large.append((node, None))
        return unknown

    def _is_known(self, node: Node, value: Any) -> bool:
        """Is it known which numbers a value consists of? The large ones among them are noted."""
        numbers = _numbers(self.program, value)
        if numbers is None:
            return False
        limit = self._limit(node)
        for number in numbers:
            if limit is not None and limit < abs(number) < math.inf:
                self.large.append((node, number))
        return True

    def keeps_one(self, dim: int) -> bool:
        """Is there one mask alone, which leaves in each row a score that is a score?"""
        at, _ = self.large[0]
        tensor, call = tensor_fact(self.scores), self.program.call(at)
        is_last = tensor is not None and dim == tensor.dim() - 1
        if self.masks != [at] or at in self.moved or not is_last or call is None:
            return False
        know = knowledge(self.program)
        if call.op == "masked_fill":
            return know.every_row_keeps_one(call.args["mask"], negated=True)
        if call.op == "where":
            is_filled = _numbers(self.program, call.args["self"]) is not None
            return know.every_row_keeps_one(call.args["condition"], negated=is_filled)
        if call.op != "add":
            return False
        biases = [v for v in (call.args["self"], call.args["other"]) if _numbers(self.program, v) is not None]
        return len(biases) == 1 and isinstance(biases[0], Node) and know.bias_keeps_one(biases[0], -1.0)


def _numbers(program: Program, value: Any) -> Iterable[float] | None:
    """The numbers that a value consists of, if they are few."""
    if not isinstance(value, Node):
        return [float(value)] if isinstance(value, (int, float)) else None
    if (numbers := levels(program, value)) is not None:
        return numbers
    elements = knowledge(program).elements(value)
    leaves = [leaf for _, leaf in elements.pieces] if elements is not None else []
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return [float(as_number(leaf)) for leaf in leaves]  # type: ignore[arg-type]
