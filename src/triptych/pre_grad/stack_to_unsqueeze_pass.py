"""stack_to_unsqueeze_pass: replaces stacks that are views of an existing value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..match.pattern import Tensor
from ..pieces.example_programs import then_write, write_between
from ..pieces.nested import Nested
from ..pieces.rule import PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


class StackOfOne(Rule):
    """stack([x], dim) -> unsqueeze(x, dim)"""

    def pattern(self, op, x: Tensor, dim):
        return op.stack([x], dim=dim)

    def rewrite(self, op, x, dim):
        return op.unsqueeze(x, dim)

    examples = [
        fires(lambda x: torch.stack([x]) + 1, "f32[4, 8]"),
        fires(lambda x: torch.stack((x,), dim=-1).relu(), "f32[4, 8]"),
        fires(lambda x: torch.stack(tensors=[x], dim=1) * 2, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.stack([x]) * 2, "f32[]"),
        fires(lambda x: torch.stack([x.relu()]), "f32[4, 8]"),
        declines(lambda x: torch.stack([x.relu()]), "f32[0, 8]", because="stride of a dim of size 1"),
        declines(lambda x: torch.stack([x]), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: torch.stack([x.t()]) * 2, "f32[4, 8]", because="stride"),
        declines(lambda x: torch.stack([x]).add_(1), "f32[4, 8]", dialects=["torch"], because="written"),
        declines(lambda x: torch.stack([x, x]) * 2, "f32[4, 8]"),
    ]


class StackOfRows(PutTogether):
    """stack(unbind(x, a), b) -> x, a permute of x, or a copy of one of these"""

    joins = ("stack",)
    taken = frozenset(["unbind", "select"])
    alone = True
    whole = True

    examples = [
        fires(lambda x: torch.stack(x.unbind(1), dim=1) + 1, "f32[4, 3, 2]"),
        fires(lambda x: torch.stack(torch.unbind(x)) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack([row for row in x]).relu(), "f32[4, 3]"),
        fires(lambda x: torch.stack([x.select(-1, i) for i in range(3)], -1) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind(-1)) * 2, "f32[3]"),
        fires(lambda x: torch.stack(x.unbind(1), 1) * 2, "f32[4, 3]", dynamic=True, dialects=["torch"]),
        fires(lambda x: torch.stack([x[2], x[1], x[0]]) * 2, "f32[3, 3]"),
        # into new memory, or with the dims in another order
        fires(lambda x: torch.stack(x.unbind(), 1) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind(-1), 0), "f32[4, 3, 2]"),
        fires(lambda x: torch.stack(x.unbind()), "f32[4, 3]"),
        fires(lambda x: then_write(torch.stack(x.unbind()), x), "f32[3]", dialects=["torch"]),
        declines(lambda x: torch.stack(x.chunk(2)) * 2, "f32[4, 3]"),
        declines(lambda x: torch.stack(x.unbind()[1:3]) * 2, "f32[4, 3]"),
        declines(lambda x, y: torch.stack([y, *x.unbind(), y]) * 2, "f32[4, 3]", "f32[3]"),
        declines(lambda x, y: torch.stack([x[0], y[0]]) * 2, "f32[3]", "f32[3]"),
        declines(lambda x, y: torch.stack([x, y]), "f32[2, 3]", "f32[2, 3]"),
        declines(lambda x: write_between(x.unbind(), x, torch.stack) * 2, "f32[3]", dialects=["torch"],
                 because="in between"),
    ]  # fmt: skip


class StackIntoCat(Nested):
    """cat([stack([a, b], d), c], d) -> cat([unsqueeze(a, d), unsqueeze(b, d), c], d)"""

    inner = "stack"

    examples = [
        fires(lambda a, b, c: torch.cat([torch.stack([a, b]), c]), "f32[3]", "f32[3]", "f32[4, 3]"),
        fires(lambda a, b, c: torch.cat([c, torch.stack([a, b], -1)], 1), "f32[4]", "f32[4]", "f32[4, 3]"),
        fires(lambda a, b, c: torch.cat([torch.stack([a, b]), c]), "f32[3]", "f32[3]", "f32[4, 3]",
              dynamic=True),
        declines(lambda a, b, c: torch.cat([torch.stack([a, b], 1), c], 0), "f32[4]", "f32[4]", "f32[3, 2]"),
        declines(lambda a, b, c: (lambda s: (torch.cat([s, c]), s * 2))(torch.stack([a, b])),
                 "f32[3]", "f32[3]", "f32[4, 3]", because="used elsewhere"),
        declines(lambda a, b, c: torch.cat([torch.stack([a, b]), c]), "i64[3]", "f32[3]", "f64[4, 3]",
                 because="converted"),
        declines(lambda a, b, c: _write_after_stack(a, b, c), "f32[3]", "f32[3]", "f32[4, 3]",
                 dialects=["torch"], because="in between"),
    ]  # fmt: skip


def _write_after_stack(a: Any, b: Any, c: Any) -> Any:
    stacked = torch.stack([a, b])
    a.add_(1)
    return torch.cat([stacked, c])


RULES: Sequence[Rule] = (StackOfOne(), StackOfRows(), StackIntoCat())


@dataclass(frozen=True)
class StackToUnsqueezePass(Pass):
    """Replaces a stack of one value, or of all rows of one value, by a view or a copy of it, and flattens a stack that
    is concatenated along the same dim."""

    name: ClassVar[str] = "stack_to_unsqueeze_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
