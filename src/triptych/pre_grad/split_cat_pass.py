"""split_cat_pass: a value that is split and concatenated again, in any way that more specific passes do not cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..pieces.example_programs import then_write, write_between
from ..pieces.read import SEEING
from ..pieces.rule import PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


class SplitCat(PutTogether):
    """cat or stack of pieces of x, or of views of pieces -> a view or a copy of x, or a cat of fewer operands"""

    between = SEEING | {"clone", "contiguous"}

    examples = [
        fires(lambda x: torch.cat(x.split(2)) + 1, "f32[6, 4]"),
        fires(lambda x: torch.stack([p.squeeze(0) for p in x.split(1)]) + 1, "f32[6, 4]"),
        fires(lambda x, y: torch.cat([y, *x.split([2, 1, 3])[1:], y]), "f32[6, 4]", "f32[2, 4]"),
        fires(lambda x: torch.stack([p.permute(1, 0) for p in x.chunk(2, 0)], -1), "f32[6, 4]"),
        fires(lambda x: torch.cat([p.expand(3, 4) for p in x.split(1)]), "f32[2, 4]"),
        fires(lambda x: torch.cat([c for p in x.chunk(2) for c in p.chunk(3)]) + 1, "f32[6, 4]"),
        fires(lambda x: torch.cat(x.split(2, -1), -1) + 1, "f32[6, 4]", dynamic=True),
        fires(lambda x: (lambda a, b, c: (torch.cat([a, b, c]) + 1, b))(*x.split(2)), "f32[6, 4]"),
        fires(lambda x: then_write(torch.cat(x.split(2)), x), "f32[6, 4]", dialects=["torch"]),
        declines(lambda x: write_between(x.split(2), x, torch.cat), "f32[6, 4]",
                 dialects=["torch"], because="in between"),
        fires(lambda x: torch.cat(x.unbind()) + 1, "f32[6, 4]"),
        # pieces at equal distances, and repeated pieces
        fires(lambda x: (lambda a, b, c, d: torch.cat([a, c]) + 1)(*x.chunk(4)), "f32[8]"),
        fires(lambda x: torch.cat([x[2:4]] * 8) + 1, "f32[8]"),
        fires(lambda x: torch.cat([c for a in x.chunk(2) for c in a.chunk(2)[1:]]) + 1, "f32[8]"),
        fires(lambda x: (lambda a, b, c: (torch.cat([a, b], 1), c.sum()))(*x.chunk(3, 1)), "f32[4, 6]"),
        fires(lambda x: torch.stack(x[1:3].unbind()) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack([x[1], x[2]]) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack([x[0], x[2]]) * 2, "f32[3, 3]"),
        fires(lambda x: torch.stack(x.split([3, 3], 1)), "f32[4, 6]", dynamic=True),
        fires(lambda x, y: torch.stack([y, *x.unbind(), y]) * 2, "f32[4, 3]", "f32[3]"),
        declines(lambda x: (lambda a, b, c, d: torch.stack([a, b, d]) * a * b * d)(*x.unbind()), "f32[4]",
                 because="nothing is saved"),
        declines(lambda x: torch.cat([p + 1 for p in x.split(2)]), "f32[6, 4]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (SplitCat(),)


@dataclass(frozen=True)
class SplitCatPass(Pass):
    """Replaces a concatenation of pieces of one value, or of views of them, by a view or a copy of the value; among
    other operands, by a cat of fewer.

    It handles every case that has no pass of its own.
    """

    name: ClassVar[str] = "split_cat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
