"""Makes random draws use the backend's counter-based generator: they are then fused, reproducible, and the same in
forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import _private
from ..ir.program import Program
from ..rewrite.examples import declines
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .random_draws import DRAWS, why_eager

KNOWN = frozenset(name for draw in DRAWS for name in (draw.drawn or draw.name, f"{draw.drawn or draw.name}_"))


class OtherDraw(Rule):
    """randperm, multinomial, poisson and other draws stay as they are: the backend's generator does not have them"""

    only_explains = True

    def sites(self, program: Program) -> Iterator[Match]:
        problem = why_eager(program.options) or "the backend's generator has no such draw"
        for node in program.graph.nodes:
            is_ours = node.target is _private.generator_prims.seeds
            if is_ours or not node.op.startswith("call") or not program.aliasing.effects(node).random:
                continue
            call = program.call(node)
            if call is None or call.op not in KNOWN:
                yield Match.at(program, node, problem=problem)

    examples = [
        declines(lambda x: x + torch.randperm(4), "f32[4]", because="no such draw"),
    ]


@dataclass(frozen=True)
class ReplaceRandomPasses(Pass):
    """Makes rand, randn, randint, uniform, normal, exponential, bernoulli and dropout draw from the backend's own
    generator, which torch.manual_seed seeds: one load of seeds for each device, one seed for each draw, in order.

    The random numbers differ from those of eager, and have the same distribution; `fallback_random` keeps those of
    eager.
    """

    name = "replace_random_passes"

    def rules(self) -> Sequence[Rule]:
        return (*DRAWS, OtherDraw())
