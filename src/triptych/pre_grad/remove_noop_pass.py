"""`remove_noop_pass`: operations that change nothing, dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import fact
from ..ir.program import ATEN, Program
from ..match.pattern import Tensor
from ..passes.base import Pass
from ..rewrite.rule import Rule
from ..testing import declines, fires
from .noop_arithmetic import ARITHMETIC
from .noop_views import VIEWS_AND_COPIES, Noop


class DetachWithoutGradient(Noop):
    """detach(x) -> x, where nothing in the graph needs a gradient"""

    def pattern(self, op, x: Tensor):
        return op.detach(x)

    def check(self, m, x):
        m.require(not _needs_gradient(m.program), "a gradient may be wanted, and detach cuts it")
        super().check(m, x)

    examples = [
        fires(lambda x: x.detach() + 1, "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: x.detach() + x, torch.ones(4, requires_grad=True), because="gradient"),
        declines(lambda x: x.detach(), "f32[4, 8]", dialects=("torch",), because="very tensor"),
    ]


def _needs_gradient(program: Program) -> bool:
    """Asked of what comes in from outside only: the facts of new nodes are computed without gradients."""
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


@dataclass(frozen=True)
class RemoveNoopPass(Pass):
    """Drops views, copies, casts, dropout and arithmetic that change nothing."""

    name = "remove_noop_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = [*VIEWS_AND_COPIES, *ARITHMETIC, DetachWithoutGradient()]
