"""move_reshape_out_of_split_stack_pass: a stack of pieces that are reshaped."""

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


class MoveReshapeOutOfSplitStack(PutTogether):
    """stack([reshape(p, s) for p in split(x)]) -> a reshape and permute of x, or a cat of fewer operands"""

    joins = ("stack",)
    taken = frozenset(["split"])
    between = frozenset(["reshape", "squeeze", "unsqueeze", "permute", "clone", "contiguous"])
    needs = frozenset(["reshape"])

    examples = [
        fires(lambda x: torch.stack([p.reshape(2, 4) for p in x.chunk(3, 1)]) + 1, "f32[4, 6]"),
        fires(lambda x: torch.stack([p.view(-1) for p in x.split(2)], -1), "f32[6, 4]"),
        fires(lambda x, y: torch.stack([y, *[p.reshape(8) for p in x.split(2)]]), "f32[6, 4]", "f32[8]"),
        fires(lambda x: torch.stack([p.flatten() for p in torch.split(x, 2, dim=0)]), "f32[6, 4]", dynamic=True),
        declines(lambda x: write_between([p.view(-1) for p in x.split(2)], x, torch.stack), "f32[6, 4]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: torch.stack(x.split(2)), "f32[6, 4]"),
        declines(lambda x, y: torch.stack([p.split(2)[0].reshape(-1) for p in (x, y)]), "f32[6, 4]", "f32[6, 4]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (MoveReshapeOutOfSplitStack(),)


@dataclass(frozen=True)
class MoveReshapeOutOfSplitStackPass(Pass):
    """Replaces a stack of the reshaped pieces of a split by one reshape and permute of the whole value; among other
    operands, by a cat of fewer."""

    name: ClassVar[str] = "move_reshape_out_of_split_stack_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
