"""split_cat_to_slices_pass: pieces of splits among other tensors in a cat."""

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


class SplitCatToSlices(PutTogether):
    """cat([y, split(x)[i], split(x)[i + 1], z]) -> cat([y, x[start:end], z])"""

    joins = ("cat",)
    taken = frozenset(["split"])
    alone = False

    examples = [
        fires(lambda x, y: torch.cat([y, *x.split(2), y]), "f32[6]", "f32[2]"),
        fires(lambda x, y: torch.cat([*x.split(2, 1), *y.chunk(2, -1)], dim=-1), "f32[4, 6]", "f32[4, 2]"),
        fires(lambda x: (lambda a, b, c, d: torch.cat([c, d, a, b]) + 1)(*x.split([1, 1, 3, 4])), "f32[9]"),
        fires(lambda x, y: torch.cat([y, *x.split(2, 1)], 1), "f32[4, 6]", "f32[4, 2]", dynamic=True),
        fires(lambda x, y: torch.concat([*x.split(2), y]), "f32[6]", "i64[2]"),
        declines(lambda x, y: write_between(x.split(2), x, lambda pieces: torch.cat([*pieces, y])), "f32[6]", "f32[2]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: torch.cat(x.split(2)), "f32[6]"),
        declines(lambda x, y: torch.cat([x.split(2)[0], y.split(2)[0]]), "f32[6]", "f32[6]"),
        declines(lambda x, y: (lambda a, b, c: (torch.cat([a, b, y]), a, b, c))(*x.split(2)), "f32[6]", "f32[2]",
                 because="nothing is saved"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (SplitCatToSlices(),)


@dataclass(frozen=True)
class SplitCatToSlicesPass(Pass):
    """Replaces adjacent pieces of a split in a cat, among other operands, by one slice."""

    name: ClassVar[str] = "split_cat_to_slices_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
