"""split_stack_to_cats_pass: a stack of pieces of a split."""

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


class SplitStackToCats(PutTogether):
    """stack(split(x, n, a), b) -> a reshape and permute of x, or a cat of fewer operands"""

    joins = ("stack",)
    taken = frozenset(["split"])

    examples = [
        fires(lambda x: torch.stack(x.split(2)) + 1, "f32[6, 4]"),
        fires(lambda x: torch.stack(x.split(2, -1), 1), "f32[4, 6]"),
        fires(lambda x, y: torch.stack([y, *x.split(2)]), "f32[6, 4]", "f32[2, 4]"),
        fires(lambda x: torch.stack(torch.chunk(x, 3, dim=1)[1:], dim=-1), "f16[4, 6]"),
        fires(lambda x: torch.stack(x.split(2, 1), 1), "f32[4, 6]", dynamic=True),
        declines(lambda x: write_between(x.split(2), x, torch.stack), "f32[6, 4]", dialects=["torch"],
                 because="in between"),
        declines(lambda x: torch.stack(x.unbind()), "f32[6, 4]"),
        declines(lambda x, y: torch.stack([x.split(2)[0], y.split(2)[0]]), "f32[6]", "f32[6]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (SplitStackToCats(),)


@dataclass(frozen=True)
class SplitStackToCatsPass(Pass):
    """Replaces a stack of the pieces of a split by one reshape and permute of the value; among other operands, by a cat
    of fewer."""

    name: ClassVar[str] = "split_stack_to_cats_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
