"""Whether autograd may follow a graph: some rewrites give the same values and another gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .facts import fact
from .program import ATEN, Program


def gradient_wanted(program: Program) -> bool:
    """May anything in the graph need a gradient?

    Asked of what comes in from outside only: the facts of new nodes are computed without gradients.
    """
    graph = program.graph
    if program.dialect == ATEN:
        return True  # traced with gradients off: the facts do not tell
    if graph.find_nodes(op="call_module", sort=False):
        return True  # its parameters may want one
    if graph.find_nodes(op="call_method", target="requires_grad_", sort=False):
        return True
    if any(n.kwargs.get("requires_grad") for n in graph.nodes):
        return True  # `torch.ones(4, requires_grad=True)`
    leaves: list[Node] = [n for kind in ("placeholder", "get_attr") for n in graph.find_nodes(op=kind, sort=False)]
    return any(_may_need(n) for n in leaves)


def _may_need(leaf: Node) -> bool:
    value: Any = fact(leaf)
    return value is None or isinstance(value, torch.Tensor) and value.requires_grad
