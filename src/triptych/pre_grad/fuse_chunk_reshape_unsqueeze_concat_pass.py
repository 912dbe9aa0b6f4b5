"""fuse_chunk_reshape_unsqueeze_concat_pass: chunk, reshape and unsqueeze of each piece, concat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..passes.base import Pass
from ..pieces.rule import PutTogether
from ..pieces.samples import then_write, write_between
from ..rewrite.rule import Rule
from ..testing import declines, fires


class FuseChunkReshapeUnsqueezeConcat(PutTogether):
    """cat([unsqueeze(reshape(p, s), d) for p in split(x)], d) -> one reshape and permute of x"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])
    between = frozenset(["reshape", "unsqueeze", "squeeze", "permute", "clone", "contiguous"])
    needs = frozenset(["unsqueeze"])
    alone = True

    examples = [
        fires(lambda x: torch.cat([p.reshape(2, 4).unsqueeze(0) for p in x.chunk(3, 1)]) + 1, "f32[4, 6]"),
        fires(lambda x: torch.cat([p.unsqueeze(1) for p in x.chunk(3, 1)], 1) + 1, "f32[4, 6]"),
        fires(lambda x: torch.cat([p.view(2, 4).unsqueeze(-1) for p in x.split(2)], -1), "f16[6, 4]"),
        fires(lambda x: torch.cat([p[None].reshape(1, 8) for p in x.split(2)], dim=-2) * 2, "i64[6, 4]"),
        fires(lambda x: torch.cat([torch.unsqueeze(p, dim=0) for p in (x[:3], x[3:])]) * 2, "f32[6, 4]"),
        fires(lambda x: torch.cat([p.unsqueeze(0) for p in x.split(2, 1)]), "f32[4, 6]", dynamic=True),
        fires(lambda x: then_write(torch.cat([p.unsqueeze(0) for p in x.chunk(2)]), x), "f32[4]", dialects=["torch"]),
        declines(lambda x: write_between([p.unsqueeze(0) for p in x.chunk(2)], x, torch.cat), "f32[4]",
                 dialects=["torch"], because="in between"),
        fires(lambda x: torch.cat([p.unsqueeze(0) for p in x.split([1, 3])], 1), "f32[4]"),
        declines(lambda x: torch.cat([p.reshape(2, 4) for p in x.chunk(3, 1)]), "f32[4, 6]"),
        declines(lambda x, y: torch.cat([y, *[p.unsqueeze(0) for p in x.chunk(2)]]), "f32[4]", "f32[1, 2]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (FuseChunkReshapeUnsqueezeConcat(),)


@dataclass(frozen=True)
class FuseChunkReshapeUnsqueezeConcatPass(Pass):
    """A value taken apart, each piece reshaped and given a dim, and all put together again, is one reshape and
    permute of the whole."""

    name: ClassVar[str] = "fuse_chunk_reshape_unsqueeze_concat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
