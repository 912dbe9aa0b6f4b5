"""`dedup_reduce_scatters`: reduces and scatters the same tensor once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..communication.example_group import reduce_scatter, wait
from ..ir.collectives import REDUCE_SCATTER, Collective, collectives
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import Erase, ReadInstead, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}


def _scattered_twice(x: Any) -> Any:
    return wait(reduce_scatter(x)) + 1, wait(reduce_scatter(x)) * 2


def _other_reduction(x: Any) -> Any:
    return wait(reduce_scatter(x)) + 1, wait(reduce_scatter(x, "max")) * 2


def _both_returned(x: Any) -> Any:
    return wait(reduce_scatter(x)), wait(reduce_scatter(x))


def _waited_for_later(x: Any) -> Any:
    first = reduce_scatter(x)
    second = wait(reduce_scatter(x)) * 2
    return wait(first) + 1, second


class ScatterOnce(Rule):
    """reduce_scatter(x), ..., reduce_scatter(x) -> one reduce_scatter(x), used for both

    All ranks compile the same graph, so all of them drop the same collective.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        first: dict[Any, Collective] = {}
        for again in list(collectives(program.graph)):
            if again.kind != REDUCE_SCATTER or again.is_coalesced:
                continue
            earlier = first.setdefault((again.operands, again.like()), again)
            if earlier is not again:
                problem = self._problem(program, earlier, again)
                yield Match.at(program, again.node, problem=problem, earlier=earlier, again=again)

    def _problem(self, program: Program, earlier: Collective, again: Collective) -> Refusal | None:
        first, second = earlier.wait, again.wait
        if first is None or second is None:
            return Refusal("a result has other uses than one wait", at=again.node)
        if second < first:
            return Refusal("{at}, which is the first, is waited for after the second", at=earlier.node)
        aliasing = program.aliasing
        if writer := aliasing.first_writer(again.operands[0], first, second):
            return Refusal("{at} writes to memory of the operand between the two", at=writer)
        if aliasing.is_output(first) and aliasing.is_output(second):
            return Refusal("the graph returns both results, which would become one tensor", at=second)
        return None

    def rewrite(self, op, m):
        earlier, again = m.bindings["earlier"], m.bindings["again"]
        users = tuple(again.wait.users)
        return Together([ReadInstead(again.wait, earlier.wait, users), Erase([again.wait, again.node])])

    examples = [
        fires(_scattered_twice, "f32[4, 8]", **ATEN),
        declines(_other_reduction, "f32[4, 8]", **ATEN),
        declines(_both_returned, "f32[4, 8]", because="the graph returns both results", **ATEN),
        declines(_waited_for_later, "f32[4, 8]", because="is waited for after the second", **ATEN),
    ]


@dataclass(frozen=True)
class DedupReduceScatters(Pass):
    """Reduces and scatters a tensor once, where a graph does it several times with the same arguments."""

    name = "dedup_reduce_scatters"

    def rules(self) -> Sequence[Rule]:
        return (ScatterOnce(),)
