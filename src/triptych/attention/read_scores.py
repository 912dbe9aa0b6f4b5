"""Reads the operations from the product of queries and keys down to the softmax as terms.

`SPELLINGS` says for each operation which of its operands may be the scores, and how it is read. An operation that is
not in it ends the search for a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.dtypes import rounded
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.values import knowledge
from ..rewrite.refusal import Refused
from .blame import blaming
from .contraction import Contraction
from .large_numbers import is_large
from .layout import VIEWS, Layout, viewed
from .masks import MASKS, is_number
from .sinks import joined_with_sink
from .terms import Bias, Cast, CutOff, Factor, Mask, Scale, ScoreType, Shift, Sink, Term, View


class ScoreReader:
    """The terms read so far, and the type of the scores after them."""

    def __init__(self, program: Program, product: Contraction, layout: Layout) -> None:
        fact = tensor_fact(product.node)
        assert fact is not None
        self.program = program
        self.product_dtype = fact.dtype
        self.type = ScoreType(tuple(fact.shape), fact.dtype, layout)
        self.node = product.node
        """The operation that is being read."""
        self.terms: list[Term] = []
        self.covered: list[Node] = []
        """Nodes that are no longer needed once the terms are read."""
        self._constants: list[Node] = []
        if not is_number(product.alpha) or not is_plain_number(product.beta):
            raise Refused("a product times something that is not a number")
        if product.alpha != 1:
            self.factor(product.alpha)
        if product.added is not None:
            self.bias(product.added, product.beta)

    def read(self, node: Node, scores: Node) -> None:
        """Read the next operation; `scores` is the operand that is followed."""
        call, result = self.program.call(node), tensor_fact(node)
        assert call is not None and result is not None
        self.node = node
        with blaming(node):
            SPELLINGS[call.op].read(self, call, scores)
        self.covered.append(node)
        while self._constants and all(u in self.covered for u in self._constants[0].users):
            self.covered.append(self._constants.pop(0))
        self._constants.clear()
        self.type = replace(self.type, shape=tuple(result.shape))
        with blaming(node):
            self.cast(result.dtype)

    # ---- terms: the methods that readers of operations call ----

    def cast(self, dtype: torch.dtype) -> None:
        if dtype == self.type.dtype:
            return
        if not dtype.is_floating_point:
            raise Refused("the scores become another kind of number")
        if torch.finfo(dtype).max < torch.finfo(self.product_dtype).max * 0.99:
            raise Refused(f"scores of {self.product_dtype} may overflow in {dtype}")
        self.terms.append(Cast(self.type, self.node, dtype))
        self.type = replace(self.type, dtype=dtype)

    def scale(self, number: float) -> None:
        """The scores times a number."""
        number = float(number)
        if not math.isfinite(number) or number == 0:
            raise Refused(f"scores are multiplied by {number}")
        self.terms.append(Scale(self.type, self.node, number))

    def factor(self, other: Any, divide: bool = False) -> None:
        """The scores times a number or a tensor, or divided by it."""
        if not isinstance(other, Node):
            if not is_number(other):
                raise Refused("an unknown factor")
            return self.scale(other if not divide else 1.0 / other if other else math.inf)
        if (number := knowledge(self.program).number(other)) is not None:
            return self.scale(number if not divide else 1 / number if number else math.inf)
        if (parts := self._per_query_and_key(other)) is not None:
            for part in parts:
                self.factor(part, divide)
            return None
        if not is_number(other) and not Value(self.program, other).is_float:
            raise Refused("a factor that is not a floating-point number")
        self.terms.append(Factor(self.type, self.node, other, divide))
        return None

    def _per_query_and_key(self, factor: Node) -> list[Node] | None:
        """The two factors of a factor that varies with query and key, where each varies with one of them: such as the
        norms of queries and keys."""
        value, layout = Value(self.program, factor), self.type.layout
        if not value.is_tensor or not value.rank:
            return None
        shape = [1] * (layout.rank - value.rank) + list(value.shape)
        own = [d for d in (layout.query, layout.key) if d is not None and not known(shape[d] == 1)]
        call = self.program.call(factor)
        if len(own) < 2 or call is None or call.op != "mul" or call.mutates:
            return None
        parts = [call.args["self"], call.args["other"]]
        facts = [tensor_fact(p) for p in parts]
        if any(f is None or known_equal(f.shape, value.shape) or not f.dtype.is_floating_point for f in facts):
            return None
        return parts

    def bias(self, other: Any, times: float = 1.0) -> None:
        """The scores plus a number or a tensor, which is multiplied by `times`."""
        result = tensor_fact(self.node)
        assert result is not None
        if not isinstance(other, Node):
            if not is_number(other) or not math.isfinite(other) or not math.isfinite(times):
                raise Refused(f"{other} is added to the scores")
            if is_large(other * times, result.dtype):
                raise Refused(f"the scores are shifted by {other * times:.4g}, beside which they are rounded")
            self.terms.append(Shift(self.type, self.node, result.dtype))
        elif is_number(other):
            self.terms.append(Shift(self.type, self.node, result.dtype))
        else:
            value = Value(self.program, other)
            if not value.is_tensor or value.dtype.is_complex or not math.isfinite(times) or times == 0:
                raise Refused("an unknown bias")
            self.terms.append(Bias(self.type, self.node, other, times, result.dtype))

    def mask(self, mask: Any, masks_out: bool, fill: Any) -> None:
        """The scores, replaced by one number where the mask is true (`masks_out`), or where it is false."""
        number = knowledge(self.program).number(fill)
        if number is None or not number <= MASKS:
            raise Refused(f"scores are filled with {fill}, which may count beside others")
        if Value(self.program, mask).dtype != torch.bool:
            raise Refused("a mask that is not boolean")
        self._constants.extend(source for source, _ in knowledge(self.program).sources(fill))
        self.terms.append(Mask(self.type, self.node, mask, masks_out, rounded(number, self.type.dtype)))

    def cut_off_below(self, bound: Any) -> None:
        """The scores, clamped from below. The bound must not exceed the lowest number of the dtype, so that the clamp
        changes at most -inf."""
        number, lowest = knowledge(self.program).number(bound), torch.finfo(self.type.dtype).min
        if number is None or math.isnan(number) or rounded(number, self.type.dtype) > lowest:
            raise Refused("the scores are cut off below")
        if rounded(number, self.type.dtype) == lowest:
            self.terms.append(CutOff(self.type, self.node, lowest))

    def subtracts_own_maximum(self, other: Any, scores: Node) -> bool:
        """Is this the highest score over the keys, with the axis kept, or the highest of all scores? Without it the
        softmax is the same."""
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
            if not whole and (dims != [self.type.layout.key] or call.get("keepdim") is not True):
                return False
            self.covered.extend(nodes)
            result = tensor_fact(self.node)
            assert result is not None
            self.terms.append(Shift(self.type, self.node, result.dtype, is_own_maximum=True))
            return True
        return False

    def sink(self, call: Call, scores: Node) -> None:
        """The scores with a further column joined to them."""
        joined = joined_with_sink(self.program, call)
        is_sink = joined is not None and joined.scores is scores and joined.sink is not scores
        if joined is None or not is_sink or joined.dim != self.type.layout.key:
            raise Refused("scores are joined with others")
        self.terms.append(Sink(self.type, self.node, joined))

    def view(self, call: Call, scores: Node) -> None:
        """The scores in another shape, or their axes in another order."""
        result = tensor_fact(self.node)
        assert result is not None
        layout, step = viewed(self.program, self.type.layout, scores, self.node)
        self.terms.append(View(self.type, self.node, call, tuple(result.shape), step))
        self.type = replace(self.type, layout=layout)


# ---- spellings ----


@dataclass(frozen=True)
class Spelling:
    """How one operation on scores is read."""

    read: Callable[[ScoreReader, Call, Node], None]
    operands: Sequence[str]
    """The parameters that may be the scores."""


SPELLINGS: dict[str, Spelling] = {}


def spelling(*ops: str, operands: Sequence[str] = ("self",)) -> Callable[[Any], Any]:
    """Registers how operations are read: a function of the reader, the call, and the operand that is followed."""

    def register(read: Callable[[ScoreReader, Call, Node], None]) -> Any:
        for op in ops:
            SPELLINGS[op] = Spelling(read, operands)
        return read

    return register


EITHER = ("self", "other")

spelling(*VIEWS)(ScoreReader.view)
spelling("cat", operands=())(ScoreReader.sink)  # the size says which operand is the scores


@spelling("to")
def _to(reader: ScoreReader, call: Call, scores: Node) -> None:
    """A change of dtype is read after every operation."""
    if call.get("device") is not None or call.get("layout") is not None:
        raise Refused("the scores go to another device")


@spelling("clone", "expand")
def _clone(reader: ScoreReader, call: Call, scores: Node) -> None:
    """The scores stay the same. Their shape does too, as for every operation that is not a view."""


@spelling("neg")
def _neg(reader: ScoreReader, call: Call, scores: Node) -> None:
    reader.scale(-1.0)


@spelling("add", operands=EITHER)
def _add(reader: ScoreReader, call: Call, scores: Node, sign: float = 1.0) -> None:
    alpha = call.get("alpha")
    if not is_number(alpha) or isinstance(alpha, Node):
        raise Refused("a sum times something that is not a number")
    first, second = call.args["self"], call.args["other"]
    if first is second:
        raise Refused("scores are added to themselves")
    if first is scores:
        reader.bias(second, sign * alpha)
    else:
        reader.scale(sign * alpha)
        reader.bias(first)


@spelling("sub", operands=EITHER)
def _sub(reader: ScoreReader, call: Call, scores: Node) -> None:
    first, second = call.args["self"], call.args["other"]
    if call.get("alpha") == 1 and first is scores and reader.subtracts_own_maximum(second, scores):
        return
    if call.get("alpha") == 1 and second is scores and reader.subtracts_own_maximum(first, scores):
        reader.scale(-1.0)
        return
    _add(reader, call, scores, -1.0)


@spelling("mul", operands=EITHER)
def _mul(reader: ScoreReader, call: Call, scores: Node) -> None:
    other = call.args["other"] if call.args["self"] is scores else call.args["self"]
    if other is scores:
        raise Refused("scores squared")
    reader.factor(other)


@spelling("div", operands=EITHER)
def _div(reader: ScoreReader, call: Call, scores: Node) -> None:
    if call.args["self"] is not scores or call.get("rounding_mode") is not None:
        raise Refused("something is divided by the scores, or rounded")
    if call.args["other"] is scores:
        raise Refused("scores divided by themselves")
    reader.factor(call.args["other"], divide=True)


@spelling("masked_fill")
def _masked_fill(reader: ScoreReader, call: Call, scores: Node) -> None:
    reader.mask(call.args["mask"], True, call.args["value"])


@spelling("where", operands=EITHER)
def _where(reader: ScoreReader, call: Call, scores: Node) -> None:
    is_kept = call.args["self"] is scores
    if is_kept and call.args["other"] is scores:
        raise Refused("a choice between the scores and themselves")
    reader.mask(call.args["condition"], not is_kept, call.args["other" if is_kept else "self"])


@spelling("maximum", "max", operands=EITHER)
def _maximum(reader: ScoreReader, call: Call, scores: Node) -> None:
    reader.cut_off_below(call.args.get("other") if call.args["self"] is scores else call.args["self"])


@spelling("clamp")
def _clamp(reader: ScoreReader, call: Call, scores: Node) -> None:
    dtype = reader.type.dtype
    highest = math.inf if call.get("max") is None else knowledge(reader.program).number(call.get("max"))
    if highest is None or rounded(highest, dtype) < torch.finfo(dtype).max:
        raise Refused("the scores are cut off above")
    if call.get("min") is not None:
        reader.cut_off_below(call.args["min"])


def is_plain_number(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool)
