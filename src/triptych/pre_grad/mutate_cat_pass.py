"""mutate_cat_pass: a cat of nothing but pieces of one split."""

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


class MutateCat(PutTogether):
    """cat(pieces of split(x)), without other operands -> x, x[start:end], or a copy of one of these"""

    joins = ("cat",)
    taken = frozenset(["split"])
    alone = True

    examples = [
        fires(lambda x: torch.cat(x.split([1, 2, 3], 1), 1) + 1, "f32[4, 6]"),
        fires(lambda x: (lambda a, b, c: (torch.cat([b, c]) * 2, a, b, c))(*x.split([1, 2, 3])), "f32[6, 4]"),
        fires(lambda x: torch.cat(torch.chunk(x, 3, dim=-1), dim=-1), "f32[4, 6]"),
        fires(lambda x: torch.cat(x.split(2, 1), 1) * 2, "f32[4, 6]", dynamic=True),
        declines(lambda x: write_between(x.split(2), x, torch.cat), "f32[6, 4]",
                 dialects=["torch"], because="in between"),
        declines(lambda x, y: torch.cat([*x.split(2), y]), "f32[6]", "f32[2]"),
        declines(lambda x: (lambda a, b, c: torch.cat([b, a]) + 1)(*x.split([1, 2, 3])), "f32[6]",
                 because="side by side"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (MutateCat(),)


@dataclass(frozen=True)
class MutateCatPass(Pass):
    """Replaces a cat whose operands are all pieces of one split by the value itself, or by a slice of it."""

    name: ClassVar[str] = "mutate_cat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
