"""`eliminate_dead_code`: drops values that nobody uses and that have no visible side effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..ir.program import Program
from ..rewrite.edits import Erase
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

VISIBLE_STREAM = "the draw advances a random generator, which changes later draws"


def _unused_sum(x):
    x.sum()
    return x + 1


def _unused_chain(x):
    x.relu().sum().sqrt()
    return x + 1


def _written(x):
    y = x.clone()
    y.add_(1)
    y[0] = 2
    F.relu(y, inplace=True)
    x.mul_(2)
    return x.sum()


def _unused_draw(x):
    torch.rand_like(x)
    return x + 1


def _unused_attention(x):
    F.scaled_dot_product_attention(x, x, x)
    return x + 1


def _checked(x):
    torch._assert_async((x == x).all())
    return x + 1


class DropUnused(Rule):
    """a value that nobody uses -> nothing"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in reversed(list(program.graph.nodes)):
            if node.users:
                continue
            if program.aliasing.is_dead(node):
                yield Match.at(program, node)
            elif program.aliasing.is_dead(node, draws_may_go=True):
                yield Match.at(program, node, problem=VISIBLE_STREAM)

    def rewrite(self, op, m):
        return Erase([m.root.node])

    examples = [
        fires(_unused_sum, "f32[4]"),
        fires(_unused_chain, "f32[4]"),
        fires(_unused_attention, "f32[2, 4, 8]"),
        declines(_written, "f32[4]", dialects=("torch",)),
        declines(_unused_draw, "f32[4]", because="advances a random generator"),
        declines(_checked, "f32[4]", dialects=("torch",)),
        declines(lambda x: x + 1, "f32[4]"),
    ]


@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    """Drops values that nobody uses; writes, asserts, collectives and draws from torch's generators stay."""

    name = "eliminate_dead_code"

    def rules(self) -> Sequence[Rule]:
        return (DropUnused(),)
