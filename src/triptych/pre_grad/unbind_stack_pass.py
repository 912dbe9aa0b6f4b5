"""unbind_stack_pass: an unbind whose pieces are stacked again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..pieces.example_programs import then_write, write_between
from ..pieces.rule import PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


class UnbindStack(PutTogether):
    """stack(unbind(x, a), b) -> permute(x), a copy of it, or a cat of fewer operands"""

    joins = ("stack",)
    taken = frozenset(["unbind"])

    examples = [
        fires(lambda x: torch.stack(x.unbind()) + 1, "f32[4, 3]"),
        fires(lambda x: torch.stack(torch.unbind(x, dim=-1), dim=0) + 1, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind(1)[1:], 1) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind()[::-1]) * 2, "i64[4, 3]"),
        fires(lambda x, y: torch.stack([y, *x.unbind()]), "f32[4, 3]", "f32[3]"),
        fires(lambda x: torch.stack(x.unbind(1), 1) * 2, "f32[4, 3]", dynamic=True, dialects=["torch"]),
        fires(lambda x: then_write(torch.stack(x.unbind()), x), "f32[4, 3]", dialects=["torch"]),
        declines(lambda x: write_between(x.unbind(), x, torch.stack), "f32[4, 3]", dialects=["torch"],
                 because="in between"),
        declines(lambda x: torch.stack(x.chunk(2)), "f32[4, 3]"),
        declines(lambda x, y: torch.stack([x.unbind()[0], y.unbind()[0]]), "f32[4, 3]", "f32[4, 3]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (UnbindStack(),)


@dataclass(frozen=True)
class UnbindStackPass(Pass):
    """Replaces a stack of the pieces of an unbind by a permute of the value, or of a part of it."""

    name: ClassVar[str] = "unbind_stack_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
