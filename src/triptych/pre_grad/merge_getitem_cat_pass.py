"""merge_getitem_cat_pass: replaces neighbouring pieces of a split in a cat by one slice."""

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


class MergeGetitemCat(PutTogether):
    """cat([split(x)[i], split(x)[i + 1], y]) -> cat([x[start:end], y]), or that slice itself"""

    joins = ("cat",)
    taken = frozenset(["split"])

    examples = [
        fires(lambda x: (lambda a, b, c: (torch.cat([a, b], 1) + 1, c * 2))(*x.split([1, 2, 3], 1)), "f32[4, 6]"),
        fires(lambda x, y: (lambda a, b, c: torch.cat([y, b, c], -1) + a.sum())(*x.chunk(3, -1)),
              "f32[4, 6]", "f32[4, 1]"),
        fires(lambda x: (lambda a, b, c: (torch.cat([a, b]) + 1, c))(*x.chunk(3)), "f32[6]", dynamic=True),
        fires(lambda x: torch.cat(x.split([2, 0, 4])[1:]) + 1, "f32[6]"),
        declines(lambda x: write_between(x.split(2), x, torch.cat), "f32[6, 4]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: (lambda a, b, c: (torch.cat([b, a, b]), a, b))(*x.split([1, 2, 3])), "f32[6]",
                 because="nothing is saved"),
        declines(lambda x: torch.cat([x[:2], x[2:]]), "f32[6]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (MergeGetitemCat(),)


@dataclass(frozen=True)
class MergeGetitemCatPass(Pass):
    """Replaces neighbouring pieces of a split in a concatenation by one slice."""

    name: ClassVar[str] = "merge_getitem_cat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
