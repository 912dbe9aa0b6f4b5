"""unbind_stack_to_slices_pass: pieces of an unbind among other tensors in a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..pieces.example_programs import write_between
from ..pieces.rule import PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


class UnbindStackToSlices(PutTogether):
    """stack([y, unbind(x)[i], unbind(x)[i + 1], z]) -> cat([y[None], x[i : i + 2], z[None]])"""

    joins = ("stack",)
    taken = frozenset(["unbind"])
    alone = False

    examples = [
        fires(lambda x, y: torch.stack([y, *x.unbind(), y]), "f32[4, 3]", "f32[3]"),
        fires(lambda x, y: torch.stack([*x.unbind(1), *y.unbind(-1)], dim=-1), "f32[4, 3]", "f32[4, 5]"),
        fires(lambda x, y: torch.stack([y, *x.unbind(1)], 1), "f32[4, 3]", "f32[4]", dynamic=True, dialects=["torch"]),
        declines(lambda x, y: write_between(x.unbind(), x, lambda rows: torch.stack([*rows, y])), "f32[4, 3]", "f32[3]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: torch.stack(x.unbind()), "f32[4, 3]"),
        declines(lambda x, y: (lambda a, b, c: torch.stack([a, y, c]) + b)(*x.unbind()), "f32[3, 4]", "f32[4]",
                 because="side by side"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (UnbindStackToSlices(),)


@dataclass(frozen=True)
class UnbindStackToSlicesPass(Pass):
    """Replaces adjacent pieces of an unbind in a stack, among other operands, by one slice in a cat."""

    name: ClassVar[str] = "unbind_stack_to_slices_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
