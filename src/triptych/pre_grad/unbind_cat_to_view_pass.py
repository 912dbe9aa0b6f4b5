"""unbind_cat_to_view_pass: a cat of the pieces of an unbind."""

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


class UnbindCatToView(PutTogether):
    """cat(unbind(x, a), b) -> a reshape and permute of x, or a cat of fewer operands"""

    joins = ("cat",)
    taken = frozenset(["unbind"])

    examples = [
        fires(lambda x: torch.cat(x.unbind()) + 1, "f32[4, 3]"),
        fires(lambda x: torch.cat(x.unbind(1), dim=-1), "f32[4, 3, 2]"),
        fires(lambda x: torch.cat(torch.unbind(x, -2)[1:], 1) * 2, "f32[4, 3, 2]"),
        fires(lambda x: torch.cat(x.unbind(1), 1), "f32[4, 3, 2]", dynamic=True, dialects=["torch"]),
        fires(lambda x, y: torch.cat([y, *x.unbind(), y]), "f32[4, 3]", "f32[2]"),
        fires(lambda x: then_write(torch.cat(x.unbind()), x), "f32[4, 3]", dialects=["torch"]),
        declines(lambda x: write_between(x.unbind(), x, torch.cat), "f32[4, 3]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: torch.cat(x.chunk(2)), "f32[4, 3]"),
        declines(lambda x, y: torch.cat([x.unbind()[0], y.unbind()[0]]), "f32[4, 3]", "f32[4, 3]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (UnbindCatToView(),)


@dataclass(frozen=True)
class UnbindCatToViewPass(Pass):
    """Replaces a cat of the pieces of an unbind by one reshape and permute of the value, or of a part of it."""

    name: ClassVar[str] = "unbind_cat_to_view_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
