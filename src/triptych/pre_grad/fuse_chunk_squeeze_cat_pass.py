"""fuse_chunk_squeeze_cat_pass: a split into pieces of size one that are squeezed and concatenated."""

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


class FuseChunkSqueezeCat(PutTogether):
    """cat([squeeze(p, d) for p in split(x, 1, d)]) -> one reshape and permute of x"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])
    between = frozenset(["squeeze", "clone", "contiguous"])
    needs = frozenset(["squeeze"])
    alone = True

    examples = [
        fires(lambda x: torch.cat([p.squeeze(1) for p in x.chunk(3, 1)], -1) + 1, "f32[4, 3, 2]"),
        fires(lambda x: torch.cat([p.squeeze(0) for p in x.split(1)]) + 1, "f32[4, 3]"),
        fires(lambda x: torch.cat([torch.squeeze(p, dim=-2) for p in torch.chunk(x, 3, dim=-2)]), "bf16[4, 3, 2]"),
        fires(lambda x: torch.cat([p.squeeze() for p in x.split(1, 1)], dim=1) * 2, "i64[4, 3, 2]"),
        fires(lambda x: torch.cat([p.squeeze(1) for p in (x[:, 1:2], x[:, 2:3])], 1), "f32[4, 3, 2]"),
        fires(lambda x: torch.cat([p.squeeze(1) for p in reversed(x.split(1, 1))], 1), "f32[4, 3, 2]"),
        fires(lambda x: (lambda a, b, c, d: torch.cat([a.squeeze(1), c.squeeze(1)], 1) + d.sum())(*x.chunk(4, 1)),
              "f32[4, 4, 2]"),
        fires(lambda x: torch.cat([p.squeeze(1) for p in x.split(1, 1)], -1), "f32[4, 3, 2]", dynamic=True),
        fires(lambda x: then_write(torch.cat([p.squeeze(0) for p in x.chunk(3)]), x), "f32[3, 2]", dialects=["torch"]),
        declines(lambda x: write_between([p.squeeze(1) for p in x.chunk(3, 1)], x, torch.cat), "f32[4, 3, 2]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: (lambda a, b, c, d, e: torch.cat([p.squeeze(0) for p in (a, b, e)]) + 1)(*x.chunk(5)),
                 "f32[5, 2]", because="not one part of the value"),
        declines(lambda x, y: torch.cat([y, *[p.squeeze(0) for p in x.chunk(3)]]), "f32[3, 2]", "f32[2]"),
        declines(lambda x: torch.cat(x.chunk(3)), "f32[6, 2]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (FuseChunkSqueezeCat(),)


@dataclass(frozen=True)
class FuseChunkSqueezeCatPass(Pass):
    """Replaces a split into pieces of size one, a squeeze of each piece and a cat by one reshape and permute of the
    whole value."""

    name: ClassVar[str] = "fuse_chunk_squeeze_cat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
