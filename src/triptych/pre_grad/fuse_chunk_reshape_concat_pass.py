"""fuse_chunk_reshape_concat_pass: a split whose pieces are reshaped and concatenated."""

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


class FuseChunkReshapeConcat(PutTogether):
    """cat([reshape(p, s) for p in split(x)]) -> one reshape and permute of x"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])
    between = frozenset(["reshape", "permute", "clone", "contiguous"])
    needs = frozenset(["reshape"])
    alone = True

    examples = [
        fires(lambda x: torch.cat([p.reshape(2, 4) for p in x.chunk(3, 1)]) + 1, "f32[4, 6]"),
        fires(lambda x: torch.cat([p.flatten() for p in x.chunk(2, -1)]), "f32[4, 6]"),
        fires(lambda x: torch.cat([p.view(-1, 2) for p in x.split(2)], 0) * 2, "f32[6, 4]"),
        fires(lambda x: torch.concat([torch.reshape(p, (4, 3, 1)) for p in torch.chunk(x, chunks=2, dim=1)], dim=-1),
              "f32[4, 6]"),
        fires(lambda x: torch.cat([p.unflatten(-1, (2, 2)) for p in x.split(4, -1)], -1), "bf16[3, 8]"),
        fires(lambda x: torch.cat([p.reshape(4, 3) for p in (x[:, :3], x[:, 3:])], -2), "i64[4, 6]"),
        fires(lambda x: torch.cat([p.contiguous().view(12) for p in x.chunk(2, 1)]), "f32[4, 6]"),
        fires(lambda x: torch.cat([p.t().reshape(6, 2) for p in x.chunk(2, 1)]) * 2, "f32[4, 6]"),
        fires(lambda x: torch.cat([p.reshape(-1) for p in x.tensor_split([2, 4])]) * 2, "f32[6, 4]"),
        fires(lambda x: (lambda a, b, c: torch.cat([p.reshape(-1) for p in (c, b, a)]))(*x.chunk(3)), "f32[6, 4]"),
        fires(lambda x: torch.cat([p.reshape(2, 1, -1) for p in x.split(2)], 1) * 2, "f32[8, 6]", dynamic=True),
        fires(lambda x: (lambda a, b: (torch.cat([a.reshape(-1), b.reshape(-1)]), a * 2))(*x.chunk(2)), "f32[4, 6]"),
        fires(lambda x: then_write(torch.cat([p.view(-1) for p in x.chunk(2)]), x), "f32[4]", dialects=["torch"]),
        declines(lambda x: write_between([p.reshape(-1) for p in x.chunk(2, 1)], x, torch.cat), "f32[4, 6]",
                 dialects=["torch"], because="in between"),
        declines(lambda x: torch.cat([p.reshape(-1) for p in x.split([2, 3, 1], 1)]), "f32[4, 6]",
                 because="side by side"),
        declines(lambda x, y: torch.cat([*[p.reshape(-1) for p in x.chunk(2)], y]), "f32[4, 6]", "f32[3]"),
        declines(lambda x: torch.cat([p * 2 for p in x.chunk(2)]), "f32[4, 6]"),
        declines(lambda x: torch.cat(x.chunk(2), 1), "f32[4, 6]"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (FuseChunkReshapeConcat(),)


@dataclass(frozen=True)
class FuseChunkReshapeConcatPass(Pass):
    """Replaces a split, a reshape of each piece and a cat by one reshape and permute of the whole value."""

    name: ClassVar[str] = "fuse_chunk_reshape_concat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
