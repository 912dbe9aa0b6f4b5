"""`remove_noop_pass`: drops operations that change nothing."""

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


class DetachWithoutGradient(Noop):
    """detach(x) -> x, where nothing in the graph needs a gradient"""

    without_gradient = True

    def pattern(self, op, x: Tensor):
        return op.detach(x)

    examples = [
        fires(lambda x: x.detach() + 1, "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: x.detach() + x, torch.ones(4, requires_grad=True), because="gradient"),
        declines(lambda x: x.detach(), "f32[4, 8]", dialects=("torch",), because="very tensor"),
    ]


@dataclass(frozen=True)
class RemoveNoopPass(Pass):
    """Drops views, copies, casts, dropout and arithmetic that change nothing."""

    name = "remove_noop_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = [*VIEWS_AND_COPIES, *ARITHMETIC, DetachWithoutGradient()]
