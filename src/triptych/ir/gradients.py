"""Whether autograd may differentiate a graph: some rewrites keep the values but change the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .facts import fact
from .program import ATEN, Program
from .text import RULE


def gradient_wanted(program: Program) -> bool:
    """May anything in the graph need a gradient?

    Facts are only consulted for inputs and attributes: those of new nodes are computed without gradients.
    """
    graph = program.graph
    if program.dialect == ATEN:
        return True  # traced with gradients off: the facts do not say so
    if _captured_without(program):
        return False
    if graph.find_nodes(op="call_module", sort=False):
        return True  # its parameters may want one
    if graph.find_nodes(op="call_method", target="requires_grad_", sort=False):
        return True
    if any(n.kwargs.get("requires_grad") for n in graph.nodes):
        return True  # `torch.ones(4, requires_grad=True)`
    leaves: list[Node] = [n for kind in ("placeholder", "get_attr") for n in graph.find_nodes(op=kind, sort=False)]
    return any(_may_need(n) for n in leaves)


def _captured_without(program: Program) -> bool:
    """Was the graph captured by Dynamo under `no_grad` or `inference_mode`? Its guards then allow calls only there."""
    if torch.is_grad_enabled() or "dynamo_compile_id" not in program.gm.meta:
        return False
    regions = _private.region_functions()  # one of them may turn gradients on
    return not any(program.graph.find_nodes(op="call_function", target=f, sort=False) for f in regions)


def _may_need(leaf: Node) -> bool:
    value: Any = fact(leaf)
    return value is None or isinstance(value, torch.Tensor) and value.requires_grad


def may_require_grad(node: Node) -> bool:
    """May the value require a gradient? The fact of a captured value says so; a new value depends on its operands."""
    seen: set[Node] = set()
    work = [node]
    while work:
        one = work.pop()
        if one in seen:
            continue
        seen.add(one)
        value: Any = fact(one)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
        if not isinstance(value, torch.Tensor) or RULE in one.meta:
            work.extend(one.all_input_nodes)
    return False


def gradient_reaches(program: Program, node: Node) -> bool:
    """May a gradient flow back through this value? Where none does, a `detach` after it changes nothing."""
    return gradient_wanted(program) and (program.dialect == ATEN or may_require_grad(node))


def reached_by_gradients(program: Program) -> set[Node]:
    """Values with a path to an output of the graph that no `detach` interrupts."""
    reached: set[Node] = set()
    for node in reversed(program.graph.nodes):
        for user in node.users:
            call = program.call(user)
            cut = call is not None and call.op == "detach"
            if user.op == "output" or (user in reached and not cut):
                reached.add(node)
                break
    return reached
