"""`remove_noop_ops`: drops operations that change nothing, after autograd; it runs in stages 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.program import Program
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from ..rules.noop_arithmetic import ARITHMETIC
from ..rules.noop_views import VIEWS_AND_COPIES, Noop


class NoopDetach(Noop):
    """detach(x) -> x, once the gradients are written out in the graph"""

    without_facts = True

    def pattern(self, op, x: Tensor):
        return op.detach(x)

    def check(self, m, x):
        super().check(m, x)
        if m.program.aliasing.is_output(m.root.node):
            m.require(
                not _is_returned(m.program, m.root.node), "the value is returned, and must not require a gradient"
            )

    examples = [
        fires(lambda x: x.detach() + 1, "f32[4, 8]", dialects=("aten",)),
        declines(lambda x: x.detach(), "f32[4, 8]", because="must not require a gradient", dialects=("aten",)),
        declines(
            lambda x: (y := x.exp(), y.detach()), "f32[4]", because="must not require a gradient", dialects=("aten",)
        ),
    ]


def _is_returned(program: Program, node: Node) -> bool:
    """Does the graph return the value, or a view of it?"""
    work = [node]
    while work:
        one = work.pop()
        if one.op == "output":
            return True
        work += [u for u in one.users if u.op == "output" or one in program.aliasing.effects(u).aliases]
    return False


@dataclass(frozen=True)
class RemoveNoopOps(Pass):
    """Drops views, aliases, copies, casts and arithmetic that change nothing; the results share memory with
    the inputs exactly as before."""

    name = "remove_noop_ops"

    def rules(self) -> Sequence[Rule]:
        return RULES

    examples = [
        fires(lambda x: torch.relu(x.view(4, 8).clone().expand(4, 8)[:] * 1), "f32[4, 8]"),
        declines(lambda x: (x.view(4, 8), x.clone()), "f32[4, 8]", because="leaves the graph"),
    ]


RULES: list[Rule] = [*VIEWS_AND_COPIES, *ARITHMETIC, NoopDetach()]
