"""`draw_into_empty_memory`: writes random draws in a form that Inductor can always lower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.program import Program
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten

INTO = {
    aten.rand.default: aten.uniform.default,
    aten.rand.generator: aten.uniform.default,
    aten.randn.default: aten.normal_functional.default,
    aten.randn.generator: aten.normal_functional.default,
}
ATEN: dict[str, Any] = {"dialects": ("aten",)}


class DrawIntoEmptyMemory(Rule):
    """rand(size) -> uniform(empty(size)), randn(size) -> normal(empty(size))

    Inductor lowers `rand` and `randn` only under `fallback_random`, and under that setting it cannot lower its own
    random operators, which the joint stage emits. It can always lower the forms used here; like `rand` in eager, they
    draw from PyTorch's generator. The rule is for draws that the joint stage does not reach: those in graphs inside
    control flow.
    """

    takes_random = True

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor" or program.options.fallback_random:
            return
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.target in INTO and node.kwargs.get("generator") is None:
                yield Match.at(program, node)

    def rewrite(self, op, m):
        node = m.root.node
        kwargs = {k: v for k, v in node.kwargs.items() if k != "generator"}
        return op.call(INTO[node.target], op.call(aten.empty.memory_format, node.args[0], **kwargs))

    examples = [
        fires(lambda x: x + torch.rand(4, 8), "f32[4, 8]", **ATEN),
        fires(lambda x: x + torch.randn(4, 8, dtype=x.dtype), "f64[4, 8]", **ATEN),
        declines(lambda x: x + torch.rand(4, 8), "f32[4, 8]", **ATEN, options={"fallback_random": True}),
        declines(lambda x: x + torch.rand(4, 8), "f32[4, 8]", **ATEN, options={"codegen": "eager"}),
        declines(lambda x: x + torch.randint(5, (8,)), "f32[4, 8]", **ATEN),
    ]


@dataclass(frozen=True)
class DrawIntoEmptyMemoryPass(Pass):
    """Writes the random draws that are left in the graph in a form that Inductor can lower."""

    name = "draw_into_empty_memory"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (DrawIntoEmptyMemory(),)
