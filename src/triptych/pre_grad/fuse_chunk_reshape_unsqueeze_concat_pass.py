"""fuse_chunk_reshape_unsqueeze_concat_pass: a split whose pieces are reshaped, unsqueezed and concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from ..ir.facts import known_equal, tensor_fact
from ..pieces.example_programs import then_write, write_between
from ..pieces.read import Way
from ..pieces.rule import PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule


class FuseChunkReshapeUnsqueezeConcat(PutTogether):
    """cat([unsqueeze(reshape(p, s), d) for p in split(x)], d) -> one reshape and permute of x"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])
    between = frozenset(["reshape", "unsqueeze", "squeeze", "permute", "clone", "contiguous"])
    needs = frozenset(["unsqueeze"])
    alone = True

    def has_needed(self, way: Way) -> bool:
        """An unsqueeze, or a reshape that `remove_reshape_pass` emitted for a reshape and an unsqueeze."""
        return super().has_needed(way) or any(gives_a_dim(n) for n in way.nodes)

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
        fires(lambda x: torch.cat([p.reshape(1, 2, 4) for p in x.chunk(3, 1)]) + 1, "f32[4, 6]"),
        fires(lambda x: torch.cat([p.reshape(2, 1, -1) for p in x.split(2)], 1) * 2, "f32[8, 6]", dynamic=True),
        declines(lambda x: torch.cat([p.reshape(2, 4) for p in x.chunk(3, 1)]), "f32[4, 6]"),
        declines(lambda x, y: torch.cat([y, *[p.unsqueeze(0) for p in x.chunk(2)]]), "f32[4]", "f32[1, 2]"),
    ]  # fmt: skip


def gives_a_dim(node: Node) -> bool:
    """Does the value have more dims of size one than its only tensor operand?"""
    result = tensor_fact(node)
    operands = [] if result is None else [t for n in node.all_input_nodes if (t := tensor_fact(n)) is not None]
    return len(operands) == 1 and result is not None and _ones(result) > _ones(operands[0])


def _ones(value: torch.Tensor) -> int:
    return sum(known_equal(size, 1) for size in value.shape)


RULES: Sequence[Rule] = (FuseChunkReshapeUnsqueezeConcat(),)


@dataclass(frozen=True)
class FuseChunkReshapeUnsqueezeConcatPass(Pass):
    """Replaces a split, a reshape and unsqueeze of each piece and a cat by one reshape and permute of the whole
    value."""

    name: ClassVar[str] = "fuse_chunk_reshape_unsqueeze_concat_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
