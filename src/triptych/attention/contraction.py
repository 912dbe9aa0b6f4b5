"""Products of matrices with every axis by its role: which are summed, which are shared, which are one operand's own."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program
from ..rewrite.refusal import NotConcerned, Refused

BROADCAST = "1"
"""The label of an axis of size one that is stretched to meet the other operand's."""


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
    """What is added to the product (`baddbmm`), times `beta`."""
    beta: Any = 1

    def swapped(self) -> Contraction:
        return Contraction(
            self.node, self.right, self.left, self.right_axes, self.left_axes, self.result_axes, self.alpha,
            self.added, self.beta,
        )  # fmt: skip

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
    if call is None or call.mutates or tensor_fact(node) is None:
        return None
    try:
        if call.op == "matmul":
            return _matmul(node, call.args["self"], call.args["other"])
        if call.op == "baddbmm":
            return _baddbmm(node, call)
        if call.op == "einsum":
            return _einsum(node, call)
    except (Refused, NotConcerned):
        return None
    return None


def _matmul(node: Node, left: Any, right: Any) -> Contraction:
    x, y = tensor_fact(left), tensor_fact(right)
    if x is None or y is None or x.dim() < 2 or y.dim() < 2:
        raise NotConcerned("vectors")
    rank = max(x.dim(), y.dim()) - 2
    batch = list(string.ascii_lowercase[:rank])
    result = (*batch, "m", "n") if rank <= 12 else ()
    if not result:
        raise NotConcerned("too many axes")
    return Contraction(
        node, left, right, (*_batch(x, batch, node), "m", "k"), (*_batch(y, batch, node), "k", "n"), result
    )


def _batch(operand: Any, labels: Sequence[str], node: Node) -> list[str]:
    """The labels of an operand's batch axes; those it lacks, or has of size one, are stretched."""
    result = tensor_fact(node)
    assert result is not None
    own = operand.shape[:-2]
    missing = len(labels) - len(own)
    found = []
    for size, label, whole in zip(own, labels[missing:], result.shape[missing:]):
        if known_equal(size, whole):
            found.append(label)
        elif known(size == 1):
            found.append(BROADCAST)
        else:
            raise Refused("axes that may or may not be stretched")
    return found


def _baddbmm(node: Node, call: Call) -> Contraction:
    product = _matmul(node, call.args["batch1"], call.args["batch2"])
    beta = call.get("beta")
    added = None if beta == 0 and not isinstance(beta, Node) else call.args["self"]
    return Contraction(
        node, product.left, product.right, product.left_axes, product.right_axes, product.result_axes,
        call.get("alpha"), added, beta,
    )  # fmt: skip


def _einsum(node: Node, call: Call) -> Contraction:
    equation, tensors = call.args.get("equation"), call.args.get("tensors")
    if not isinstance(equation, str) or not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
        raise NotConcerned("not a product of two tensors")
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if len(parts) != 2 or not arrow:
        raise NotConcerned("no result named")
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
    result = tuple(output.replace("...", "".join(dots)))
    for axes in (*sides, result):
        if len(set(axes)) != len(axes):
            raise NotConcerned("a diagonal")
    sizes: dict[str, Any] = {}
    for axes, f in zip(sides, facts):
        for axis, size in zip(axes, f.shape):  # type: ignore[union-attr]
            if not known_equal(sizes.setdefault(axis, size), size):
                raise NotConcerned("an axis of two sizes")
    alone = [a for s, o in (sides, sides[::-1]) for a in s if a not in o and a not in result]
    if alone:
        raise NotConcerned("an axis of one operand is summed")
    return Contraction(node, tensors[0], tensors[1], sides[0], sides[1], result)
