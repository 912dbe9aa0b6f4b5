"""Reads the operations from the softmax down to the product with the values as terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.values import knowledge
from ..rewrite.refusal import NotConcerned, Refused
from .blame import blaming
from .contraction import contraction_of
from .layout import VIEWS, Layout, viewed
from .masks import is_number
from .terms import Cast, Dropout, DropSink, Factor, NanToZero, Scale, ScoreType, Term, View, ZeroWhere


def way_down(program: Program, softmax: Node) -> tuple[list[Node], Node]:
    """The operations between the softmax and the product with the values, and that product."""
    node = softmax
    passed: list[Node] = []
    while True:
        users = list(node.users)
        if len(users) != 1:
            if any(_leads_to_product(program, u) for u in users):
                raise Refused("the probabilities {at} are used {found} times", at=node, found=len(users))
            raise NotConcerned("no product with values follows")
        before, node = node, users[0]
        if contraction_of(program, node) is not None:
            return passed, node
        call = program.call(node)
        if call is None or call.mutates or call.op not in PROBABILITY_SPELLINGS:
            after = any(contraction_of(program, u) is not None for u in node.users)
            if call is not None and after and tensor_fact(node) is not None:
                raise Refused(f"{call.op} stands between the softmax and the product with the values", at=node)
            raise NotConcerned("no product with values follows")
        operands = [call.args.get(k) for k in ("self", "input", "other")]
        if sum(o is before for o in operands) != 1 or (call.op == "div" and operands[0] is not before):
            raise NotConcerned("no product with values follows")
        passed.append(node)


def _leads_to_product(program: Program, node: Node) -> bool:
    """Is a value, after views alone, an operand of a product?"""
    while contraction_of(program, node) is None:
        call = program.call(node)
        if call is None or call.mutates or call.op not in (*VIEWS, "expand") or len(node.users) != 1:
            return False
        node = next(iter(node.users))
    return True


def goes_into_product(program: Program, softmax: Node) -> bool:
    """Does a product with values follow, with nothing in between that is not understood?"""
    try:
        way_down(program, softmax)
    except Refused:
        return False
    return True


class ProbabilityReader:
    """The terms read so far, and the type of the probabilities after them."""

    def __init__(self, program: Program, softmax: Node, layout: Layout) -> None:
        fact = tensor_fact(softmax)
        assert fact is not None
        self.program = program
        self.type = ScoreType(tuple(fact.shape), fact.dtype, layout)
        self.node = self.reading = softmax
        """The probabilities so far, and the operation on them that is being read."""
        self.terms: list[Term] = []

    def read(self, node: Node) -> None:
        """Read the next operation."""
        self.reading = node
        with blaming(node):
            self._read(node)
        self.node = node

    def _read(self, node: Node) -> None:
        call = self.program.call(node)
        old, new = tensor_fact(self.node), tensor_fact(node)
        assert call is not None and old is not None and new is not None
        if not new.dtype.is_floating_point or new.device != old.device:
            raise Refused("the probabilities become another kind of number, or go to another device")
        if call.op not in (*VIEWS, "slice") and not known_equal(old.shape, new.shape):
            raise Refused("the probabilities are stretched")
        PROBABILITY_SPELLINGS[call.op](self, call, node)
        self.type = replace(self.type, shape=tuple(new.shape))
        if new.dtype != self.type.dtype:
            self.terms.append(Cast(self.type, self.reading, new.dtype))
            self.type = replace(self.type, dtype=new.dtype)

    def same(self, call: Call, node: Node) -> None:
        """The probabilities stay the same; a change of dtype is read after every operation."""

    def view(self, call: Call, node: Node) -> None:
        result = tensor_fact(node)
        assert result is not None
        layout, step = viewed(self.program, self.type.layout, self.node, node)
        self.terms.append(View(self.type, self.reading, call, tuple(result.shape), step))
        self.type = replace(self.type, layout=layout)

    def slice(self, call: Call, node: Node) -> None:
        old, new = tensor_fact(self.node), tensor_fact(node)
        assert old is not None and new is not None
        self.terms.append(DropSink(self.type, self.reading, call, old, new))

    def dropout(self, call: Call, node: Node) -> None:
        rate, train = call.args["p"], call.get("train")
        if not isinstance(rate, (int, float)) or not isinstance(train, bool):
            raise Refused("a dropout rate that is not a number")
        if train and rate:
            self.terms.append(Dropout(self.type, self.reading, float(rate)))

    def masked_fill(self, call: Call, node: Node) -> None:
        self._zero_where(call.args["mask"], True, call.args["value"])

    def where(self, call: Call, node: Node) -> None:
        is_kept = call.args["self"] is self.node
        self._zero_where(call.args["condition"], not is_kept, call.args["other" if is_kept else "self"])

    def _zero_where(self, mask: Any, masks_out: bool, value: Any) -> None:
        if knowledge(self.program).number(value) != 0:
            raise Refused("probabilities are masked otherwise than the scores")
        self.terms.append(ZeroWhere(self.type, self.reading, mask, masks_out))

    def nan_to_num(self, call: Call, node: Node) -> None:
        if call.get("nan") not in (None, 0):
            raise Refused("NaN becomes another number than zero")
        self.terms.append(NanToZero(self.type, self.reading))

    def factor(self, call: Call, node: Node) -> None:
        other = call.args["other"] if call.args["self"] is self.node else call.args["self"]
        divide = call.op == "div"
        if divide and call.get("rounding_mode") is not None:
            raise Refused("probabilities are rounded")
        if isinstance(other, Node):
            if divide and not Value(self.program, other).is_float:
                raise Refused("a factor of the probabilities that is not a floating-point tensor")
            self.terms.append(Factor(self.type, self.reading, other, divide))
            return
        if not is_number(other) or (divide and other == 0):
            raise Refused("an unknown factor of the probabilities")
        self.terms.append(Scale(self.type, self.reading, float(1 / other if divide else other)))


PROBABILITY_SPELLINGS: dict[str, Callable[[ProbabilityReader, Call, Node], None]] = {
    **dict.fromkeys(VIEWS, ProbabilityReader.view),
    **dict.fromkeys(("to", "clone", "expand"), ProbabilityReader.same),
    **dict.fromkeys(("mul", "div"), ProbabilityReader.factor),
    "slice": ProbabilityReader.slice,
    "dropout": ProbabilityReader.dropout,
    "masked_fill": ProbabilityReader.masked_fill,
    "where": ProbabilityReader.where,
    "nan_to_num": ProbabilityReader.nan_to_num,
}
"""How each operation on probabilities is read; one that is not here ends the search for the product with the values."""
