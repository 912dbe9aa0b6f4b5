"""fuse_split_getitem_squeeze_cat: a split into pieces of size one, some of which are squeezed and concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..cost import Moved, Work, bytes_of
from ..ir.facts import tensor_of
from ..pieces.example_programs import then_write, write_between
from ..pieces.read import TAKING
from ..pieces.rule import Form, PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

INDEX_BYTES = 8


class SplitGetitemSqueezeCat(PutTogether):
    """cat([squeeze(split(x, 1, d)[i], d) for i in rows]) -> one gather (or reshape) of x

    A gather reads an index too, so it is a little slower than a kernel that copies a few pieces, and faster than one
    that searches among many. The user asks for it by adding the pass; what it costs is recorded.
    """

    asked_for = True
    joins = ("cat", "stack")
    taken = TAKING
    between = frozenset(["squeeze", "clone", "contiguous"])
    alone = True
    gathers = True

    def weigh(self, m: Match, form: Form) -> None:
        if not form.gathers:
            return
        result, operands = tensor_of(m.root.node), len(m["tensors"])
        generated = m.program.options.codegen == "inductor" and result.device.type == "cuda"
        moved = 2 * bytes_of(result)
        cat, gather = Moved(moved, operands=operands if generated else 1), Moved(moved + INDEX_BYTES * operands)
        m.pays(Work.of(result.device, cat), Work.of(result.device, gather))

    examples = [
        fires(lambda x: torch.cat([x.split(1, 1)[i].squeeze(1) for i in (0, 1, 4)], -1) + 1, "f32[4, 5, 2]"),
        fires(lambda x: torch.cat([x.chunk(5)[i].squeeze(0) for i in (3, 1, 4, 1)]), "bf16[5, 2]"),
        fires(lambda x: torch.stack([x.split(1, -1)[i].squeeze(-1) for i in (4, 0, 1)], 1), "i64[3, 5]"),
        fires(lambda x: torch.cat([x.split(1, 1)[i].squeeze(1) for i in (1, 2, 3)], -1), "f32[4, 5, 2]"),
        fires(lambda x: torch.cat([x.unbind(1)[i] for i in (0, 3, 4)], 1), "f32[4, 5, 2]", dynamic=True,
              dialects=["torch"]),
        fires(lambda x: then_write(torch.cat([x.split(1)[i].squeeze(0) for i in (0, 1, 4)]), x), "f32[5, 2]",
              dialects=["torch"]),
        declines(lambda x: write_between([x.split(1)[i].squeeze(0) for i in (0, 1, 4)], x, torch.cat), "f32[5, 2]",
                 dialects=["torch"], because="in between"),
        declines(lambda x, y: torch.cat([y, *[x.split(1)[i].squeeze(0) for i in (0, 1, 4)]]), "f32[5, 2]", "f32[2]"),
        declines(lambda x: torch.cat([x.split([1, 2, 3, 1])[i] for i in (0, 2, 3)]), "f32[7]",
                 because="not one part of the value"),
    ]  # fmt: skip


RULES: Sequence[Rule] = (SplitGetitemSqueezeCat(),)


@dataclass(frozen=True)
class FuseSplitGetitemSqueezeCat(Pass):
    """Replaces a concatenation of some rows of a value, in any order, by one gather."""

    name: ClassVar[str] = "fuse_split_getitem_squeeze_cat"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return RULES
