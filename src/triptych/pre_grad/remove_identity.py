"""remove_identity: drops calls that return their operand unchanged.

`remove_noop_pass` needs facts to prove that a view, a copy or arithmetic changes nothing. The calls here are
no-ops by their name, or by the dtype or rank of their operand. The two passes share the rules for modules and dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from ..rules.noop_views import Noop, NoopAlias, NoopConj, NoopDropout, NoopIdentity

ROUNDING = ("round", "floor", "ceil", "trunc")


class Positive(Noop):
    """+x -> x"""

    def pattern(self, op, x: Tensor):
        return op.positive(x)

    def check(self, m, x):
        m.require(x.dtype is not None, "shape and dtype are not known")

    examples = [
        fires(lambda x: (+x) * 2, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: torch.positive(x).relu(), "i64[4]", dialects=("torch",), dynamic=True),
        fires(lambda x: x.positive(), "f32[4, 8]", dialects=("torch",)),  # the very tensor, before and after
        fires(lambda x: (+x).add_(1), "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: (+x) * 2, "f32[0]", dialects=("torch",)),
        declines(lambda x: (-x) * 2, "f32[4, 8]"),
    ]


class AtLeastItsRank(Noop):
    """atleast_1d(x), atleast_2d(x), atleast_3d(x) -> x, where x has that many dims already"""

    def pattern(self, op, x: Tensor):
        return op.one_of(["atleast_1d", "atleast_2d", "atleast_3d"], x)

    examples = [
        fires(lambda x: torch.atleast_2d(x) + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: torch.atleast_1d(x) + 1, "f32[4]", dialects=("torch",), dynamic=True),
        fires(lambda x: torch.atleast_3d(x).add_(1), "f32[4, 8, 2]", dialects=("torch",)),
        declines(lambda x: torch.atleast_2d(x) + 1, "f32[4]"),
        declines(lambda x, y: torch.atleast_1d(x, y)[0] + 1, "f32[4]", "f32[4]"),
    ]


class RoundedInteger(Noop):
    """round(x), floor(x), ceil(x), trunc(x) -> x, where x is an integer"""

    def pattern(self, op, x: Tensor):
        return op.one_of(ROUNDING, x)

    def check(self, m, x):
        m.applies(x.known and not x.is_float and not x.dtype.is_complex, "x is not known to be an integer")
        super().check(m, x)

    examples = [
        fires(lambda x: x.round() + 1, "i64[4, 8]"),
        fires(lambda x: torch.floor(x) * x.trunc(), "i32[4, 8]"),
        fires(lambda x: torch.ceil(x) + 1, "i64[4, 8]", dynamic=True),
        declines(lambda x: x.round() + 1, "f32[4, 8]"),
        declines(lambda x: x.floor(), "i64[4, 8]", because="leaves the graph"),
        declines(lambda x: x.floor().add_(1), "i64[4, 8]", dialects=("torch",), because="written"),
    ]


RULES: Sequence[Rule] = (
    NoopIdentity(), NoopDropout(), Positive(), AtLeastItsRank(), RoundedInteger(), NoopConj(), NoopAlias(),
)  # fmt: skip


@dataclass(frozen=True)
class RemoveIdentity(Pass):
    """Drops calls that return their operand unchanged: `nn.Identity`, dropout that drops nothing, `+x`, `atleast_2d` of
    a matrix, rounding of integers, the real part of a real number.

    `x.detach()` is not dropped, because it blocks the gradient.
    """

    name: ClassVar[str] = "remove_identity"

    def rules(self) -> Sequence[Rule]:
        return RULES

    examples = [
        fires(lambda x: F.dropout(+x, 0.0) * 2, "f32[4, 8]", dialects=("torch",)),
        fires(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Dropout(0.0)), "f32[4, 8]", dialects=("modules",)),
        declines(lambda x: x.detach() * 2, "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: F.dropout(x, 0.5) * 2, "f32[4, 8]", dialects=("torch",)),
    ]
