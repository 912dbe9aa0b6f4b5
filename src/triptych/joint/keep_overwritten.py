"""`keep_overwritten`: saves the old value of an input that the forward writes and the backward needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from .. import _private
from ..ir.facts import POLICY
from ..ir.halves import computed_from_gradients
from ..ir.program import Program
from ..rewrite.edits import Annotate, ReadInstead, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

COPY = torch.ops.aten.copy_.default
"""The write of an input, as AOTAutograd puts it at the end of the forward."""


def _scaled_by_counter(x: Any, counter: Any) -> Any:
    result = x * counter.exp()
    counter.add_(1)
    return result


def _counted(x: Any, counter: Any) -> Any:
    counter.add_(1)
    return x * 2


X = torch.arange(4.0, requires_grad=True)
JOINT: dict[str, Any] = {"dialects": ("joint",)}


class KeepOverwritten(Rule):
    """f(x), copy_(x, y) -> f(clone(x)), copy_(x, y), where the backward needs f(x), or x itself

    The backward runs after the write, so a value that it reads or recomputes from the input would be wrong. An input
    that requires a gradient is written by AOTAutograd's runtime, after the forward and outside the graph: then autograd
    would refuse to run the backward.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        nodes = list(program.graph.nodes)
        writes = {n: n.args[0] for n in nodes if n.target is COPY and n.args[0].op == "placeholder"}
        writes |= {n: n for n in _written_after_the_forward(program)}
        if not writes:
            return
        late = computed_from_gradients(nodes)
        needed = _needed_for(late, nodes)
        first = next(n for n in nodes if n.op != "placeholder")
        for write, source in writes.items():
            readers = [u for u in source.users if u is not write]
            if write not in late and not needed.isdisjoint(readers):
                yield Match.at(program, source, before=first, about=write, readers=readers)

    def rewrite(self, op, m):
        before = op.clone(m.root)
        return Together(
            [
                ReadInstead(m.root.node, before.node, m.bindings["readers"]),
                Annotate(before.node, POLICY, CheckpointPolicy.MUST_SAVE),
            ]
        )

    examples = [
        fires(_scaled_by_counter, X, "f32[4]", **JOINT),
        fires(_scaled_by_counter, X, "f32[4]", **JOINT, dynamic=True),
        declines(_counted, X, "f32[4]", **JOINT),
        declines(lambda x, y: x * y, X, "f32[4]", **JOINT),
    ]


def _written_after_the_forward(program: Program) -> list[Node]:
    """The inputs into which AOTAutograd's runtime copies outputs of the forward."""
    described = program.graph.output_node().meta.get("desc") or ()
    written = [d.mutated_input for d in described if isinstance(d, _private.InputMutationAOTOutput)]
    inputs = program.graph.find_nodes(op="placeholder") if written else ()
    return [n for n in inputs if n.meta.get("desc") in written]


def _needed_for(late: set[Node], nodes: Sequence[Node]) -> set[Node]:
    """The backward, and everything that it is computed from."""
    needed: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "output":
            continue
        if node in late or not needed.isdisjoint(node.users):
            needed.add(node)
    return needed


@dataclass(frozen=True)
class KeepOverwrittenPass(Pass):
    """Saves the old value of an input that the forward writes, if the backward needs it."""

    name = "keep_overwritten"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (KeepOverwritten(),)
