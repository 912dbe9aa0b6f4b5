"""Softmax written by hand: exp(x - max) / sum, exp(x - logsumexp), exp(log_softmax)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..passes.base import PassRun

Found = tuple[Node, int, list[Node]]
"""The scores, the dim, and the nodes whose work a softmax does."""


def softmax_by_hand(run: PassRun, node: Node) -> None:
    """exp(x - max(x)) / sum(exp(x - max(x))) -> softmax(x), up to rounding; with any of the three ways to write it"""
    call = run.program.call(node)
    find = FORMS.get(call.op) if call is not None and not call.mutates else None
    found = find(run.program, node) if find is not None else None
    if found is None:
        return
    scores, dim, nodes = found
    run.replace("softmax_by_hand", node, lambda op: op.softmax(scores, dim), covered=nodes)


def _exp_over_sum(program: Program, node: Node) -> Found | None:
    call = program.call(node)
    assert call is not None
    top, bottom = call.args["self"], call.args["other"]
    total = _reduction(program, bottom, ("sum",))
    if total is None or total[0] is not top or call.get("rounding_mode") is not None:
        return None
    exp = program.call(top) if isinstance(top, Node) else None
    if exp is None or exp.op != "exp" or exp.mutates:
        return None
    shifted = program.call(exp.args["self"])
    if shifted is None or shifted.op != "sub" or shifted.get("alpha") != 1:
        return None
    scores, shift = shifted.args["self"], shifted.args["other"]
    highest = _reduction(program, shift, ("amax", "max"))
    if highest is None or highest[0] is not scores or highest[1] != total[1]:
        return None
    return scores, total[1], [*total[2], top, exp.args["self"], *highest[2]]


def _exp_of_log(program: Program, node: Node) -> Found | None:
    call = program.call(node)
    assert call is not None
    inner_node = call.args["self"]
    inner = program.call(inner_node) if isinstance(inner_node, Node) else None
    if inner is None or inner.mutates:
        return None
    if inner.op == "log_softmax" and inner.get("dtype") is None:
        return inner.args["self"], inner.args["dim"], [inner_node]
    if inner.op == "sub" and inner.get("alpha") == 1:
        scores, shift = inner.args["self"], inner.args["other"]
        found = _reduction(program, shift, ("logsumexp",))
        if found is not None and found[0] is scores:
            return scores, found[1], [inner_node, *found[2]]
    return None


FORMS: dict[str, Callable[[Program, Node], Found | None]] = {"div": _exp_over_sum, "exp": _exp_of_log}


def _reduction(program: Program, node: Any, ops: tuple[str, ...]) -> Found | None:
    """A reduction over one dim that is kept, or its first result, possibly cut off from the gradient."""
    nodes: list[Node] = []
    while isinstance(node, Node):
        nodes.append(node)
        call = program.call(node)
        if call is None or call.mutates:
            return None
        if call.op == "detach" or (call.op == "getitem" and call.args["index"] == 0):
            node = call.args["self"]
            continue
        dim = call.get("dim")
        dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
        operand = call.args.get("self")
        if call.op not in ops or call.get("keepdim") is not True or call.args.get("dtype") is not None:
            return None
        known = tensor_fact(operand)
        if not isinstance(operand, Node) or known is None or len(dims) != 1 or not isinstance(dims[0], int):
            return None
        return operand, dims[0] % known.dim(), nodes
    return None
