"""`remove_noop_ops`: operations that change nothing, dropped after autograd; stages 2 and 3 share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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

    examples = [
        fires(lambda x: x.detach() + 1, "f32[4, 8]", dialects=("aten",)),
        declines(lambda x: x.detach(), "f32[4, 8]", because="very tensor", dialects=("aten",)),
        declines(lambda x: (y := x.exp(), y.detach()), "f32[4]", because="very tensor", dialects=("aten",)),
    ]


@dataclass(frozen=True)
class RemoveNoopOps(Pass):
    """Drops views, aliases, copies, casts and arithmetic that change nothing; what is returned shares memory with
    the inputs exactly as before."""

    name = "remove_noop_ops"

    def rules(self) -> Sequence[Rule]:
        return RULES

    examples = [
        fires(lambda x: torch.relu(x.view(4, 8).clone().expand(4, 8)[:] * 1), "f32[4, 8]"),
        declines(lambda x: (x.view(4, 8), x.clone()), "f32[4, 8]", because="leaves the graph"),
    ]


RULES: list[Rule] = [*VIEWS_AND_COPIES, *ARITHMETIC, NoopDetach()]
