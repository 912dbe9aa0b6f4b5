"""remove_split_with_size_one_pass: splits into one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..match.pattern import Int, Tensor
from ..pieces.example_programs import then_write
from ..pieces.plan import plan
from ..pieces.read import way_of
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


class PieceThatIsTheWhole(Rule):
    """split(x, sizes)[i] -> x, where the piece is all of x"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, sizes, dim, i: Int):
        return op.split(x, sizes, dim=dim)[i]

    def check(self, m, x):
        way = way_of(m.program, m.root.node, frozenset(["split"]))
        m.applies(way is not None and way.nodes[:1] == (m.root.node,) and plan(way.map) == [], "a part of the value")

    def rewrite(self, op, x):
        return x

    examples = [
        fires(lambda x: x.chunk(1)[0] + 1, "f32[4, 8]"),
        fires(lambda x: torch.split(x, 8, dim=-1)[0] + 1, "f32[4, 8]"),
        fires(lambda x: x.split([8, 0], 1)[0] + 1, "f32[4, 8]"),
        fires(lambda x: x.chunk(1, 1)[0] + 1, "f32[4, 8]", dynamic=True),
        fires(lambda x: then_write(x.chunk(1)[0], x), "f32[4, 8]"),  # one memory before and after
        fires(lambda x: x.split(4, 1)[0] + 1, "i64[0, 4]"),
        declines(lambda x: x.chunk(2)[0] + 1, "f32[4, 8]"),
        declines(lambda x: x.chunk(1)[0], "f32[4, 8]", because="very tensor"),
    ]


RULES: Sequence[Rule] = (PieceThatIsTheWhole(),)


@dataclass(frozen=True)
class RemoveSplitWithSizeOnePass(Pass):
    """Replaces a piece of a split that is the whole value by that value."""

    name: ClassVar[str] = "remove_split_with_size_one_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
