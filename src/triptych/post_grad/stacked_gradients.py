"""`stacked_gradients`: gradients of weights that were stacked, in the layout of the weights."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ..ir.partitioned import GRADIENTS, returns_gradients
from ..ir.program import Program
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Rule


def _returns_gradients(graph: Graph) -> None:
    graph.output_node().meta[GRADIENTS] = True


BACKWARD: dict[str, Any] = {"dialects": ("aten",), "prepare": _returns_gradients}


class StackedGradients(Rule):
    """permute(bmm(a, b), [0, 2, 1])[i] -> bmm(permute(b), permute(a))[i], where that is returned; up to rounding

    So the gradients of x_i @ w_i.t() come, computed by one product over the stack. Autograd copies a gradient whose
    strides are not those of its weight: a launch for each of them, after the graph.
    """

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor):
        return op.permute(op.matmul(a, b), dims=[0, 2, 1])

    def check(self, m, a, b):
        m.applies(a.known and b.known and a.rank == b.rank == 3 and returns_gradients(m.program.graph))
        users = list(m.root.node.users)
        m.applies(bool(users) and all(_is_returned_part(m.program, user) for user in users))

    def rewrite(self, op, a, b):
        return op.matmul(op.permute(b, [0, 2, 1]), op.permute(a, [0, 2, 1]))

    examples = [
        fires(lambda a, b: [a.bmm(b).mT[i] for i in range(2)], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
        fires(lambda a, b: a.bmm(b).permute(0, 2, 1)[1], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
        declines(lambda a, b: a.bmm(b).permute(0, 2, 1)[1], "f32[2, 3, 4]", "f32[2, 4, 5]"),
        declines(lambda a, b: a.bmm(b).permute(0, 2, 1)[1] + 1, "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
        declines(lambda a, b: a.bmm(b).permute(2, 1, 0)[1], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
    ]


def _is_returned_part(program: Program, node: Node) -> bool:
    call = program.call(node)
    return call is not None and call.op == "select" and all(user.op == "output" for user in node.users)
