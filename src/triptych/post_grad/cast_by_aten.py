"""`cast_by_aten`: writes casts with the operator that PyTorch itself uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.program import Program
from ..rewrite.edits import SetArguments
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

CONVERT = torch.ops.prims.convert_element_type.default
EAGER: dict[str, Any] = {"dialects": ("aten",), "options": {"codegen": "eager"}}


def _convert(x: Any) -> Any:
    return CONVERT(x, torch.float64) * 2


class CastByAten(Rule):
    """prims.convert_element_type(x, dtype) -> _to_copy(x, dtype=dtype), where PyTorch runs the graph

    Decompositions emit this prim, which is meant for code generation. When PyTorch runs it on a parameter, the result
    requires a gradient even under `no_grad`.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen == "eager":
            for node in program.graph.find_nodes(op="call_function", target=CONVERT):
                yield Match.at(program, node)

    def rewrite(self, op, m):
        x, dtype = m.root.node.args
        return SetArguments(m.root.node, (x,), {"dtype": dtype}, target=torch.ops.aten._to_copy.default)

    examples = [
        fires(_convert, "f32[4, 8]", **EAGER),
        declines(_convert, "f32[4, 8]", dialects=("aten",)),
        declines(lambda x: x.double(), "f32[4, 8]", **EAGER),
    ]


@dataclass(frozen=True)
class CastByAtenPass(Pass):
    """Writes casts with PyTorch's own operator where PyTorch runs the graph, without a code generator."""

    name = "cast_by_aten"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (CastByAten(),)
