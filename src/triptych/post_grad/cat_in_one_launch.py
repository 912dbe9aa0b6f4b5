"""`cat_in_one_launch`: computes a cat of many large inputs by torch's own kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cost import bytes_of
from ..ir.facts import fact
from ..ir.program import Program
from ..rewrite.edits import SetArguments
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten

FEW_OPERANDS = 8
LARGE_CAT = 64 << 20
"""If a cat has more than FEW_OPERANDS operands, Inductor's kernel determines for each element which operand it comes
from. From this many bytes on, that is slower than torch's own kernel."""

ON_CPU: dict[str, Any] = {"dialects": ("aten",), "settings": {"device": "cpu", "least_bytes": 64}}


@dataclass(frozen=True)
class CatInOneLaunch(Rule):
    """cat([x, y, ...]) -> triptych::cat([x, y, ...]), for many large inputs of the graph on a GPU

    The rule declines if the graph computes an operand: the kernel that Inductor generates for the operand can write it
    to its part of the result directly.
    """

    device: str = "cuda"
    least_bytes: int = LARGE_CAT

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen == "inductor":
            for node in program.graph.find_nodes(op="call_function", target=aten.cat.default):
                yield Match.at(program, node)

    def check(self, m):
        tensors: Any = m.root.node.args[0]
        facts = [fact(n) for n in tensors]
        m.applies(len(tensors) > FEW_OPERANDS and all(f.device.type == self.device for f in facts))
        m.require(all(f.dtype == facts[0].dtype for f in facts), "operands of several dtypes")
        m.require(
            sum(map(bytes_of, facts)) >= self.least_bytes,
            "so few bytes are copied faster by a kernel fused with other operations",
        )
        views = (aten.unsqueeze.default, aten.view.default)
        sources = [n.args[0] if n.target in views else n for n in tensors]
        computed = next((s for s in sources if s.op not in ("placeholder", "get_attr")), None)
        m.require(
            computed is None,
            "an operand is computed in the graph: its kernel can write to the result directly",
            at=computed,
        )

    def rewrite(self, op, m):
        node = m.root.node
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return SetArguments(node, (node.args[0], dim), target=torch.ops.triptych.cat.default)

    examples = [
        fires(lambda *given: torch.cat(given, 1), *["f32[2, 4]"] * 9, **ON_CPU),
        fires(lambda *given: torch.cat([g[None] for g in given]), *["f32[2, 4]"] * 12, **ON_CPU),
        declines(lambda *given: torch.cat(given, 1), *["f32[2, 4]"] * 9, dialects=("aten",)),
        declines(lambda *given: torch.cat(given), *["f32[2, 4]"] * 8, **ON_CPU),
        declines(lambda x, *given: torch.cat([x.relu(), *given]), *["f32[2, 4]"] * 9, **ON_CPU, because="computed"),
        declines(lambda *given: torch.cat(given), *["f32[1, 1]"] * 9, **ON_CPU, because="few bytes"),
    ]


@dataclass(frozen=True)
class CatInOneLaunchPass(Pass):
    """On a GPU, concatenates many large inputs of the graph by one launch of torch's own kernel."""

    name = "cat_in_one_launch"

    def rules(self) -> Sequence[Rule]:
        return (CatInOneLaunch(),)
