"""Matrix products with labelled axes: which are summed, which both operands share, and which only one operand has."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.gradients import may_require_grad
from ..ir.program import Program
from ..rewrite.refusal import NotConcerned, Refused

BROADCAST = "1"
"""The label of an axis of size one that is broadcast to the size of the other operand's axis."""


@dataclass(frozen=True)
class Contraction:
    """`left` and `right` multiplied and summed over the labels that the result does not have."""

    node: Node
    left: Node
    right: Node
    left_axes: tuple[str, ...]
    right_axes: tuple[str, ...]
    result_axes: tuple[str, ...]
    alpha: Any = 1
    added: Node | None = None
    """The tensor that is added to the product (`baddbmm`), times `beta`."""
    beta: Any = 1

    def swapped(self) -> Contraction:
        return replace(self, left=self.right, right=self.left, left_axes=self.right_axes, right_axes=self.left_axes)

    @property
    def summed(self) -> list[str]:
        return [a for a in self.left_axes if a in self.right_axes and a not in self.result_axes]

    @property
    def only_left(self) -> list[str]:
        return [a for a in self.result_axes if a in self.left_axes and a not in self.right_axes]

    @property
    def only_right(self) -> list[str]:
        return [a for a in self.result_axes if a in self.right_axes and a not in self.left_axes]


def contraction_of(program: Program, node: Node) -> Contraction | None:
    """The node as a product of two tensors, if it is one and its shapes are known."""
    call = program.call(node)
    if call is None or call.mutates or tensor_fact(node) is None or call.op not in FORMS:
        return None
    try:
        return FORMS[call.op](node, call)
    except Refused:
        return None


def _matmul(node: Node, call: Call) -> Contraction:
    return _product(node, call.args["self"], call.args["other"])


def _product(node: Node, left: Any, right: Any) -> Contraction:
    x, y = tensor_fact(left), tensor_fact(right)
    if x is None or y is None or x.dim() + y.dim() < 3:
        raise NotConcerned("vectors")
    if y.dim() == 1 or x.dim() == 1:  # the whole batch times one vector
        own = tuple(string.ascii_lowercase[: max(x.dim(), y.dim()) - 2])
        if y.dim() == 1:
            return Contraction(node, left, right, (*own, "m", "k"), ("k",), (*own, "m"))
        return Contraction(node, left, right, ("k",), (*own, "k", "n"), (*own, "n"))
    rank = max(x.dim(), y.dim()) - 2
    if rank > 10:
        raise NotConcerned("too many axes")
    batch = list(string.ascii_lowercase[:rank])
    return Contraction(
        node, left, right, (*_batch(x, batch, node), "m", "k"), (*_batch(y, batch, node), "k", "n"), (*batch, "m", "n")
    )


def _batch(operand: Any, labels: Sequence[str], node: Node) -> list[str]:
    """The labels of an operand's batch axes; an axis that is broadcast has the label `BROADCAST`."""
    result = tensor_fact(node)
    assert result is not None
    own = operand.shape[:-2]
    missing = len(labels) - len(own)
    own_labels = []
    for size, label, whole in zip(own, labels[missing:], result.shape[missing:]):
        if known_equal(size, whole):
            own_labels.append(label)
        elif known(size == 1):
            own_labels.append(BROADCAST)
        else:
            raise Refused("axes that may or may not be stretched")
    return own_labels


def _baddbmm(node: Node, call: Call) -> Contraction:
    product = _product(node, call.args["batch1"], call.args["batch2"])
    return _with_sum(product, call)


def _addmm(node: Node, call: Call) -> Contraction:
    return _with_sum(_product(node, call.args["mat1"], call.args["mat2"]), call)


def _with_sum(product: Contraction, call: Call) -> Contraction:
    beta = call.get("beta")
    ignored = beta == 0 and not isinstance(beta, Node)
    if ignored and may_require_grad(call.args["self"]):
        raise Refused("what is added times zero has a gradient, which is zero")
    return replace(product, alpha=call.get("alpha"), added=None if ignored else call.args["self"], beta=beta)


def _linear(node: Node, call: Call) -> Contraction:
    """x W^T + b: keys, or values, that all of a batch share."""
    x, w = tensor_fact(call.args["input"]), tensor_fact(call.args["weight"])
    if x is None or w is None or x.dim() < 2 or x.dim() > 10 or w.dim() != 2:
        raise NotConcerned("vectors")
    own = tuple(string.ascii_lowercase[: x.dim() - 2])
    bias = call.get("bias")
    return Contraction(
        node, call.args["input"], call.args["weight"], (*own, "m", "k"), ("n", "k"), (*own, "m", "n"), added=bias
    )


def _einsum(node: Node, call: Call) -> Contraction:
    equation, tensors = call.args.get("equation"), call.args.get("tensors")
    if not isinstance(equation, str) or not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
        raise NotConcerned("not a product of two tensors")
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if len(parts) != 2:
        raise NotConcerned("not a product of two tensors")
    facts = [tensor_fact(t) for t in tensors]
    if any(f is None for f in facts):
        raise NotConcerned("shapes are not known")
    spare = [c for c in string.ascii_uppercase if c not in equation]
    free = max((f.dim() - len(p.replace("...", "")) for f, p in zip(facts, parts) if "..." in p), default=0)  # type: ignore[union-attr]
    dots = spare[:free]
    sides = []
    for f, part in zip(facts, parts):
        own = f.dim() - len(part.replace("...", "")) if "..." in part else 0  # type: ignore[union-attr]
        if "..." in part and own != free:
            raise NotConcerned("ellipses of several lengths")
        sides.append(tuple(part.replace("...", "".join(dots))))
    if not arrow:  # labels that occur once are kept, in alphabetical order
        letters = inputs.replace("...", "").replace(",", "")
        output = ("..." if "..." in inputs else "") + "".join(c for c in sorted(letters) if letters.count(c) == 1)
    result = tuple(output.replace("...", "".join(dots)))
    for axes in (*sides, result):
        if len(set(axes)) != len(axes):
            raise NotConcerned("a diagonal")
    sizes: dict[str, Any] = {}
    for axes, f in zip(sides, facts):
        if len(axes) != f.dim():  # type: ignore[union-attr]
            raise NotConcerned("an equation of other ranks")
        for axis, size in zip(axes, f.shape):  # type: ignore[union-attr]
            if not known_equal(sizes.setdefault(axis, size), size):
                raise NotConcerned("an axis of two sizes")
    if any(a not in result for s, o in (sides, sides[::-1]) for a in s if a not in o):
        raise NotConcerned("an axis of one operand is summed")
    return Contraction(node, tensors[0], tensors[1], sides[0], sides[1], result)


FORMS = {"matmul": _matmul, "baddbmm": _baddbmm, "addmm": _addmm, "linear": _linear, "einsum": _einsum}
