"""`deduplicate_wait_tensors`: waits for a collective once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..communication.example_group import all_gather, all_reduce, wait
from ..ir.collectives import is_wait
from ..ir.program import Program
from ..rewrite.edits import Erase, ReadInstead, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}


def _waited_for_twice(x: Any) -> Any:
    started = all_reduce(x)
    return wait(started) + 1, wait(started) * 2


def _two_collectives(x: Any) -> Any:
    return wait(all_reduce(x)) + 1, wait(all_gather(x)) * 2


class WaitOnce(Rule):
    """wait(x), ..., wait(x) -> one wait(x), used for both

    A wait returns its operand itself, so both are one tensor in any case.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        first: dict[Node, Node] = {}
        for node in list(program.graph.nodes):
            if is_wait(node) and (earlier := first.setdefault(node.args[0], node)) is not node:
                yield Match.at(program, node, earlier=earlier)

    def rewrite(self, op, m, earlier):
        again = m.root.node
        return Together([ReadInstead(again, earlier.node, tuple(again.users)), Erase([again])])

    examples = [
        fires(_waited_for_twice, "f32[4, 8]", **ATEN),
        declines(_two_collectives, "f32[4]", **ATEN),
    ]


@dataclass(frozen=True)
class DeduplicateWaitTensors(Pass):
    """Waits once for the result of a collective that is waited for several times."""

    name = "deduplicate_wait_tensors"

    def rules(self) -> Sequence[Rule]:
        return (WaitOnce(),)
