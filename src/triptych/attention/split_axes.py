"""Scores whose axes are split for a moment, so that rows and columns of an image have a bias each."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..passes.base import PassRun
from ..rewrite.emit import Emitter
from .contraction import contraction_of

LONGEST = 8


def bias_of_split_axes(run: PassRun, node: Node) -> None:
    """(s.view(b, h, w, h, w) + rows + columns).view(s.shape) -> s + (rows + columns).reshape(s.shape), up to rounding,
    for a product s"""
    program = run.program
    if node._erased or not _is_reshape(program, node):
        return
    wanted = tensor_fact(node)
    chain = _sums(program, node)
    if wanted is None or not chain:
        return
    start = program.call(chain[-1][0])
    assert start is not None
    scores = tensor_fact(start.args["self"])
    split = tensor_fact(chain[-1][0])
    if scores is None or split is None or not known_equal(scores.shape, wanted.shape):
        return
    if scores.dtype != wanted.dtype or split.dim() <= scores.dim() or not _is_product(program, start.args["self"]):
        return
    if known_equal(split.shape[-2:], scores.shape[-2:]):  # a bias of windows, which need not be stretched for that
        return

    def make(op: Emitter) -> Any:
        total: Value | None = None
        for _, other, sign in reversed(chain[:-1]):
            other = Value(program, other)
            signed = other if sign == 1 else op.neg(other)
            total = signed if total is None else op.add(total, signed)
        assert total is not None
        if not known_equal(total.shape, split.shape):
            total = op.expand(total, list(split.shape))
        return op.add(start.args["self"], op.reshape(total, list(wanted.shape)))

    run.replace("bias_of_split_axes", node, make, covered=[n for n, _, _ in chain])


def _sums(program: Program, node: Node) -> list[tuple[Node, Any, int]]:
    """The sums above a reshape, with what is added, down to the reshape that split the axes; none if it is not so."""
    call = program.call(node)
    found: list[tuple[Node, Any, int]] = []
    while call is not None and len(found) < LONGEST:
        inner = call.args["self"]
        if not isinstance(inner, Node) or len(inner.users) != 1:
            return []
        call = program.call(inner)
        if _is_reshape(program, inner):
            return [*found, (inner, None, 0)] if found else []
        if call is None or call.mutates or call.op not in ("add", "sub") or call.get("alpha") != 1:
            return []
        left, right = tensor_fact(call.args["self"]), tensor_fact(call.args["other"])
        whole = tensor_fact(inner)
        if left is None or right is None or whole is None or not known_equal(left.shape, whole.shape):
            return []
        found.append((inner, call.args["other"], 1 if call.op == "add" else -1))
    return []


def _is_reshape(program: Program, node: Node) -> bool:
    call = program.call(node)
    return call is not None and call.op == "reshape" and not call.mutates


def _is_product(program: Program, node: Any) -> bool:
    """A product of matrices, or a multiple of one."""
    for _ in range(LONGEST):
        if not isinstance(node, Node):
            return False
        if contraction_of(program, node) is not None:
            return True
        call = program.call(node)
        if call is None or call.mutates or call.op not in ("mul", "div", "to"):
            return False
        node = call.args["self"]
    return False
