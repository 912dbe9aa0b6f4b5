"""`cat_in_one_launch`: computes a cat of many large inputs by torch's own kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import Moved, Operand, OperatorCall, Work, bytes_of
from ..cost.device import FEW_OPERANDS
from ..ir.facts import fact
from ..ir.program import Program
from ..rewrite.edits import SetArguments
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten
CAT = torch.ops.triptych.cat.default

ON_CPU: dict[str, Any] = {"dialects": ("aten",), "settings": {"device": "cpu"}}


@dataclass(frozen=True)
class CatInOneLaunch(Rule):
    """cat([x, y, ...]) -> triptych::cat([x, y, ...]), for many large inputs of the graph on a GPU

    Inductor's kernel slows down with every operand; torch's kernel copies at the bandwidth of the memory, but calling
    it takes the host longer. The rule declines if the graph computes an operand: the kernel that Inductor generates for
    the operand can write it to its part of the result directly.
    """

    device: str = "cuda"

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen == "inductor":
            for node in program.graph.find_nodes(op="call_function", target=aten.cat.default):
                yield Match.at(program, node)

    def check(self, m):
        tensors: Any = m.root.node.args[0]
        facts = [fact(n) for n in tensors]
        m.applies(len(tensors) > FEW_OPERANDS and all(f.device.type == self.device for f in facts))
        m.require(all(f.dtype == facts[0].dtype for f in facts), "operands of several dtypes")
        views = (aten.unsqueeze.default, aten.view.default)
        sources = [n.args[0] if n.target in views else n for n in tensors]
        computed = next((s for s in sources if s.op not in ("placeholder", "get_attr")), None)
        m.require(
            computed is None,
            "an operand is computed in the graph: its kernel can write to the result directly",
            at=computed,
        )
        operands, moved = tuple(map(Operand.of, facts)), 2 * sum(map(bytes_of, facts))
        # not measured: the time of Inductor's kernel is unknown before it is generated
        generated = Work.of(facts[0].device, Moved(moved, operands=len(tensors)), by_clock=False)
        is_called = not m.program.options.is_replayed
        call = OperatorCall(CAT, (operands, _dim(m.root.node)), produced=moved / 2, through_python=is_called)
        m.pays(generated, Work.of(facts[0].device, call))

    def rewrite(self, op, m):
        node = m.root.node
        return SetArguments(node, (node.args[0], _dim(node)), target=CAT)

    examples = [
        fires(lambda *given: torch.cat(given, 1), *["f32[512, 4]"] * 9, **ON_CPU),
        fires(lambda *given: torch.cat([g[None] for g in given]), *["f32[512, 4]"] * 12, **ON_CPU),
        declines(lambda *given: torch.cat(given, 1), *["f32[512, 4]"] * 9, dialects=("aten",)),
        declines(lambda *given: torch.cat(given), *["f32[512, 4]"] * 8, **ON_CPU),
        declines(lambda x, *given: torch.cat([x.relu(), *given]), *["f32[2, 4]"] * 9, **ON_CPU, because="computed"),
        declines(lambda *given: torch.cat(given), *["f32[1, 1]"] * 9, **ON_CPU, because="would cost"),
    ]


def _dim(node: Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)


@dataclass(frozen=True)
class CatInOneLaunchPass(Pass):
    """On a GPU, concatenates many large inputs of the graph by one launch of torch's own kernel."""

    name = "cat_in_one_launch"

    def rules(self) -> Sequence[Rule]:
        return (CatInOneLaunch(),)
