"""`compute_masks_again`: recomputes a comparison mask in the backward if the compared value is saved for it anyway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.effects import effects
from ..ir.partitioned import backward_of, kept_values
from ..ir.program import Program
from ..rewrite.examples import declines, fires
from ..rewrite.partitioned import KeepInstead, behind_views
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

COMPARISONS = frozenset(getattr(torch.ops.aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne"))

BOTH: dict[str, Any] = {"dialects": ("partitioned",)}
X = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
STACKED = [torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_(), torch.ones(3, 4, 5, requires_grad=True)]


class ComputeMasksAgain(Rule):
    """saved for the backward: x.t(), x <= 0 -> x; the backward computes x.t() and x <= 0 from it

    The partitioner treats x and a view of x as different values, and then saves the mask although x is saved anyway. A
    comparison costs nothing in a kernel that reads its operand, whereas the mask must be written to memory and read
    again.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        backward = backward_of(program.gm)
        if backward is None:
            return
        for mask in [n for n in kept_values(program.gm, backward) if _is_comparison(n)]:
            saved, inputs = kept_values(program.gm, backward), backward.inputs
            (compared,) = mask.all_input_nodes
            views = [n for n in saved if compared in behind_views(n) and n.name in inputs]
            if mask.name not in inputs:
                continue
            if not views:
                yield Match.at(program, mask, problem="the compared value is not saved for the backward")
            elif any(compared in effects(user).writes for user in compared.users):
                yield Match.at(program, mask, problem="the compared value is written in place")
            else:
                source = compared if compared in views else views[0]
                yield Match.at(program, mask, compared=compared, held=source)

    def rewrite(self, op, m):
        return KeepInstead(m.bindings["compared"], m.bindings["held"], m.root.node)

    examples = [
        fires(lambda x, w: torch.bmm(torch.relu(x).permute(1, 0, 2), w), *STACKED, **BOTH),
        fires(lambda x, w: torch.bmm(torch.relu(x).permute(1, 0, 2), w), *STACKED, **BOTH, dynamic=True),
        declines(lambda x: (x > 0) * x.sin(), X, **BOTH),
        declines(lambda x, w: x @ w, X, torch.ones(4, 2, requires_grad=True), **BOTH),
    ]


def _is_comparison(node: Node) -> bool:
    return node.op == "call_function" and node.target in COMPARISONS and len(node.all_input_nodes) == 1


@dataclass(frozen=True)
class ComputeMasksAgainPass(Pass):
    """Recomputes a comparison in the backward if the compared value is saved for the backward anyway."""

    name = "compute_masks_again"
    changes_interface = True

    def rules(self) -> Sequence[Rule]:
        return (ComputeMasksAgain(),)
