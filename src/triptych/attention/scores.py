"""From a product of queries and keys down to their softmax: what is added, multiplied and masked on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import fact, known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .contraction import contraction_of
from .layout import BatchStep, Layout, groups, permuted, reshaped

SEARCHED = 40
"""Nodes looked at above one softmax."""
NEGLIGIBLE = -9e3
"""A score this low has no weight beside any other: what is filled with it is masked."""

SAME = ("to", "clone", "reshape", "permute", "unsqueeze", "squeeze", "neg", "masked_fill")
EITHER = ("add", "sub", "mul", "div", "where")


def paths(program: Program, softmax: Node) -> Iterator[list[Node]]:
    """Ways from a product of two tensors down to the softmax's operand, the shortest choice first."""
    call = program.call(softmax)
    assert call is not None
    budget = [SEARCHED]

    def climb(node: Node, below: list[Node]) -> Iterator[list[Node]]:
        budget[0] -= 1
        if budget[0] < 0 or tensor_fact(node) is None:
            return
        if contraction_of(program, node) is not None:
            yield [node, *below]
            return
        call = program.call(node)
        if call is None or call.mutates or call.op not in (*SAME, *EITHER):
            return
        params = ("self",) if call.op in SAME else ("self", "other")
        for param in params:
            operand = call.args.get(param)
            if isinstance(operand, Node) and _full(operand, node, call):
                yield from climb(operand, [node, *below])

    operand = call.args["self"]
    if isinstance(operand, Node):
        yield from climb(operand, [])


def obstacle_above(program: Program, softmax: Node) -> str | None:
    """What keeps a softmax that stands between two products from being read as attention."""
    if not any(contraction_of(program, user) is not None for user in softmax.users):
        return None
    work, seen = [(n, "") for n in softmax.all_input_nodes], 0
    while work and seen < SEARCHED:
        (node, through), seen = work.pop(0), seen + 1
        call = program.call(node)
        if contraction_of(program, node) is not None:
            return f"{through} stands between the product and the softmax" if through else None
        if call is not None and tensor_fact(node) is not None:
            name = through or ("" if call.op in (*SAME, *EITHER) else call.op)
            work += [(n, name) for n in node.all_input_nodes]
    return None


def _full(operand: Node, node: Node, call: Call) -> bool:
    """Does the operand have an element for each of the result's? Scores do, what is added to them need not."""
    x, y = tensor_fact(operand), tensor_fact(node)
    if x is None or y is None or not x.dtype.is_floating_point:
        return False
    return call.op in SAME or known_equal(x.shape, y.shape)


@dataclass
class Scores:
    """`scale * Q K^T + bias`, less what is masked, as far as it was followed."""

    program: Program
    op: Emitter
    layout: Layout
    shape: Sequence[Any]
    scale: float = 1.0
    steps: list[BatchStep] = field(default_factory=list)
    factors: list[tuple[int, Value]] = field(default_factory=list)
    """Tensors the scores are multiplied with, each with the number of steps made before."""
    bias: Value | None = None
    keep: Value | None = None
    """Where a score counts; as broad as it must be to be broadcast to the scores."""
    fill: float | None = None
    """What stands where it does not."""
    added_to_masked: bool = False
    """Something was added after a mask: what is masked out is no longer the same everywhere."""
    covered: list[Node] = field(default_factory=list)

    def follow(self, node: Node, scores: Node) -> None:
        """One operation further down; `scores` is the operand that is followed."""
        call = self.program.call(node)
        assert call is not None
        getattr(self, f"_{call.op}")(call, scores)
        self.covered.append(node)
        known_result = tensor_fact(node)
        assert known_result is not None
        self.shape = list(known_result.shape)

    # ---- arithmetic ----

    def _to(self, call: Call, scores: Node) -> None:
        dtype = call.get("dtype")
        if set(call.args) - {"self", "dtype"} or (dtype is not None and not dtype.is_floating_point):
            raise Refused("the scores go to another device or kind of number")

    def _clone(self, call: Call, scores: Node) -> None:
        """The same scores."""

    def _neg(self, call: Call, scores: Node) -> None:
        self._times(-1.0)

    def _add(self, call: Call, scores: Node) -> None:
        if call.get("alpha") != 1:
            raise Refused("a sum with another alpha")
        self._plus(call.args["other"] if call.args["self"] is scores else call.args["self"])

    def _sub(self, call: Call, scores: Node) -> None:
        if call.get("alpha") != 1:
            raise Refused("a difference with another alpha")
        first, second = call.args["self"], call.args["other"]
        if first is scores:
            if self._is_own_maximum(second, scores):
                self.covered.extend(self._maximum_nodes(second))
                return
            self._plus(second, negative=True)
        else:
            self._times(-1.0)
            self._plus(first)

    def _mul(self, call: Call, scores: Node) -> None:
        other = call.args["other"] if call.args["self"] is scores else call.args["self"]
        if other is scores:
            raise Refused("scores squared")
        self._factor(other)

    def _div(self, call: Call, scores: Node) -> None:
        if call.args["self"] is not scores or call.get("rounding_mode") is not None:
            raise Refused("something is divided by the scores")
        other = call.args["other"]
        if isinstance(other, (int, float)):
            self._times(1.0 / other)
        else:
            self._factor(other, divide=True)

    def _times(self, number: float) -> None:
        if not math.isfinite(number) or number == 0:
            raise Refused(f"scores are multiplied by {number}")
        if number < 0 and self.keep is not None:
            raise Refused("masked scores are multiplied by a negative number")
        self.scale *= number
        if self.bias is not None:
            self.bias = self.op.mul(self.bias, number)

    def _factor(self, other: Any, divide: bool = False) -> None:
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return self._times(float(other))
        known_factor = fact(other)
        if self.keep is not None:
            raise Refused("masked scores are multiplied by a tensor")
        if known_factor is None or isinstance(known_factor, (bool, torch.SymBool)):
            raise Refused("an unknown factor")
        value = Value(self.program, other)
        if divide:
            value = self.op.rdiv(value, 1) if isinstance(known_factor, torch.Tensor) else self.op.call(_inverse, value)
        self.factors.append((len(self.steps), value))
        if self.bias is not None:
            self.bias = self.op.mul(self.bias, value)

    def _plus(self, other: Any, negative: bool = False) -> None:
        if not isinstance(other, Node):
            return  # one number for all scores of a row: the softmax is the same
        known_bias = tensor_fact(other)
        if known_bias is None:
            return
        if not known_bias.dtype.is_floating_point:
            raise Refused("integers are added to the scores")
        value = Value(self.program, other)
        value = self.op.neg(value) if negative else value
        self.added_to_masked |= self.keep is not None
        self.bias = value if self.bias is None else self.op.add(self.bias, value)

    def _is_own_maximum(self, other: Any, scores: Node) -> bool:
        """max(scores) over the keys, kept as an axis: taking it away changes no softmax."""
        nodes = self._maximum_nodes(other)
        call = self.program.call(nodes[-1]) if nodes else None
        if call is None or call.op not in ("amax", "max") or call.args.get("self") is not scores:
            return False
        dim = call.get("dim")
        dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
        return dims == [self.layout.key] and call.get("keepdim") is True

    def _maximum_nodes(self, other: Any) -> list[Node]:
        if not isinstance(other, Node):
            return []
        nodes = [other]
        while (call := self.program.call(nodes[-1])) is not None and call.op in ("getitem", "detach"):
            nodes.append(call.args["self"])
        return nodes

    # ---- masks ----

    def _masked_fill(self, call: Call, scores: Node) -> None:
        self._mask(self.op.logical_not(Value(self.program, call.args["mask"])), call.args["value"])

    def _where(self, call: Call, scores: Node) -> None:
        condition = Value(self.program, call.args["condition"])
        if call.args["self"] is scores:
            self._mask(condition, call.args["other"])
        else:
            self._mask(self.op.logical_not(condition), call.args["self"])

    def _mask(self, keep: Value, fill: Any) -> None:
        number = self._number(fill)
        if number is None or not number <= NEGLIGIBLE:
            raise Refused(f"scores are filled with {fill}, which may count beside others")
        if keep.dtype != torch.bool:
            raise Refused("a mask that is not boolean")
        if self.fill is not None and self.fill != number:
            raise Refused("masks that fill with different numbers")
        self.fill = number
        self.keep = keep if self.keep is None else self.op.logical_and(self.keep, keep)

    def _number(self, value: Any) -> float | None:
        """A number, or the one value of a tensor that holds nothing else."""
        if isinstance(value, (int, float)):
            return float(value)
        while isinstance(value, Node) and (call := self.program.call(value)) is not None:
            if call.op in ("to", "expand", "clone", "detach"):
                value = call.args["self"]
            elif call.op in ("full", "full_like"):
                value = call.args["fill_value"]
            elif call.op == "scalar_tensor":
                value = call.args["s"]
            elif call.op == "tensor":
                (value, *_) = call.args["operands"]
            else:
                return None
            if isinstance(value, (int, float)):
                return float(value)
        return None

    # ---- views ----

    def _permute(self, call: Call, scores: Node) -> None:
        dims = call.args["dims"]
        self.bias, self.keep = (
            None if v is None else self.op.permute(padded(self.op, v, len(dims)), dims) for v in (self.bias, self.keep)
        )
        self.layout, step = permuted(self.layout, dims)
        if step is not None:
            self.steps.append(step)

    def _reshape(self, call: Call, scores: Node) -> None:
        self._view(list(call.args["shape"]))

    def _unsqueeze(self, call: Call, scores: Node) -> None:
        shape = list(self.shape)
        shape.insert(call.args["dim"] % (len(shape) + 1), 1)
        self._view(shape)

    def _squeeze(self, call: Call, scores: Node) -> None:
        dim = call.get("dim")
        dims = [dim] if isinstance(dim, int) else dim
        if dims is None or any(d in (self.layout.query, self.layout.key) for d in dims):
            raise Refused("an axis of queries or keys may be dropped")
        self._view([s for d, s in enumerate(self.shape) if d not in dims or not known(s == 1)])

    def _view(self, shape: Sequence[Any]) -> None:
        shape = [fact(s) if isinstance(s, Node) else s for s in shape]
        old = list(self.shape)
        self.layout, step = reshaped(self.layout, old, shape)
        self.steps.append(step)
        self.bias, self.keep = (None if v is None else self._along(v, old, shape) for v in (self.bias, self.keep))

    def _along(self, value: Value, old: Sequence[Any], new: Sequence[Any]) -> Value:
        """What is broadcast to the scores, after a reshape of them: stretched only where axes are mixed."""
        value = padded(self.op, value, len(old))
        sizes = list(value.shape)
        shape: list[Any] = []
        for before, after in groups(old, new):
            if all(known(sizes[d] == 1) for d in before):
                shape += [1] * len(after)
            elif len(before) == len(after) == 1:
                shape.append(sizes[before[0]])
            else:
                for d in before:
                    sizes[d] = old[d]
                shape += [new[d] for d in after]
        if not known_equal(sizes, value.shape):
            value = self.op.expand(value, sizes)
        return value if known_equal(shape, value.shape) else self.op.reshape(value, shape)


def padded(op: Emitter, value: Value, rank: int) -> Value:
    """With axes of size one in front, as broadcasting adds them."""
    if value.rank == rank:
        return value
    return op.reshape(value, [*[1] * (rank - value.rank), *value.shape])


def _inverse(number: Any) -> Any:
    return 1 / number
