"""`lift_constants`: reads constant tensors of the graph module through `lift_fresh_copy`, as Inductor expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph

from ..ir.modules import attribute
from ..ir.program import Program
from ..rewrite.edits import ReadInstead
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

LIFT = torch.ops.aten.lift_fresh_copy.default


def _read_bare(graph: Graph) -> None:
    """For examples: drops the copy that tracing inserts, as our passes do."""
    for node in graph.find_nodes(op="call_function", target=LIFT):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


ATEN: dict[str, Any] = {"dialects": ("aten",), "prepare": _read_bare}


class LiftConstants(Rule):
    """f(c) -> f(lift_fresh_copy(c)), for a tensor c of the graph's module

    `x + torch.tensor(2.0)` is traced as a tensor of the module that `lift_fresh_copy` reads. Our passes drop that copy;
    Inductor needs it: its fake-tensor propagation refuses a real tensor among fake operands, and many of its lowerings
    expect a computed value where the bare tensor would be a constant. The copy costs nothing: it becomes a load inside
    the kernel that reads the value.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor":
            return
        for node in program.graph.find_nodes(op="get_attr"):
            bare = [u for u in node.users if u.target is not LIFT]
            if bare and isinstance(attribute(program.gm, node.target), torch.Tensor):
                yield Match.at(program, node, before=node.next, users=bare)

    def rewrite(self, op, m):
        lifted = op.call(LIFT, m.root)
        lifted.node.meta = {**m.root.node.meta, **lifted.node.meta}
        return ReadInstead(m.root.node, lifted.node, m.bindings["users"])

    examples = [
        fires(lambda x: x + torch.tensor(2.0), "f32[4, 8]", **ATEN),
        fires(lambda x: (lambda t: (x + t, t * 2))(torch.tensor([1.0, 2.0])), "f32[4, 2]", **ATEN),
        declines(lambda x: x + torch.tensor(2.0), "f32[4, 8]", **ATEN, options={"codegen": "eager"}),
        declines(lambda x: x + torch.tensor(2.0), "f32[4, 8]", dialects=("aten",)),
        declines(lambda x: x + 1, "f32[4, 8]", **ATEN),
    ]


@dataclass(frozen=True)
class LiftConstantsPass(Pass):
    """Reads every tensor of the graph's module through a copy, which Inductor makes a load inside a kernel."""

    name = "lift_constants"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (LiftConstants(),)
