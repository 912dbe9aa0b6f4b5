"""`stacked_gradients`: computes the gradients of stacked weights in the layout of the weights."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ..cost import Product, Work, read_and_written
from ..ir.facts import tensor_of
from ..ir.partitioned import mark_gradients, returns_gradients
from ..ir.program import Program
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires, mark_as_gradients
from ..rewrite.rule import Rule


def _of_the_same(graph: Graph) -> None:
    returned: Any = graph.output_node().args[0]
    mark_gradients(graph, [tensor_of(node) for node in returned])


BACKWARD: dict[str, Any] = {"dialects": ("aten",), "prepare": mark_as_gradients}


class StackedGradients(Rule):
    """permute(bmm(a, b), [0, 2, 1])[i] -> bmm(permute(b), permute(a))[i], in the layout of the weights; up to rounding

    The gradients of x_i @ w_i.t() have this form when one product over the stack computes them. After the graph,
    autograd copies every gradient whose strides differ from those of its weight, with one launch for each. The copies
    are weighed against the two products, which may have kernels of different speed.
    """

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor):
        return op.permute(op.matmul(a, b), dims=[0, 2, 1])

    def check(self, m, a, b):
        m.applies(a.known and b.known and a.rank == b.rank == 3 and returns_gradients(m.program.graph))
        users = list(m.root.node.users)
        m.applies(bool(users) and all(_is_returned_part(m.program, user) for user in users))
        copies = [read_and_written(tensor_of(user), times=2) for user in users]
        new = Work.of(a.device, Product.of(b.tensor.mT, a.tensor.mT))
        m.pays(Work.of(a.device, Product.of(a.tensor, b.tensor), copies), new)

    def rewrite(self, op, a, b):
        return op.matmul(op.permute(b, [0, 2, 1]), op.permute(a, [0, 2, 1]))

    examples = [
        fires(lambda a, b: [a.bmm(b).mT[i] for i in range(2)], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
        fires(lambda a, b: [a.bmm(b).permute(0, 2, 1)[1]], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
        declines(lambda a, b: [a.bmm(b).permute(0, 2, 1)[1]], "f32[2, 3, 4]", "f32[2, 4, 5]"),
        declines(lambda a, b: [a.bmm(b).permute(0, 2, 1)[1]], "f32[2, 3, 4]", "f32[2, 4, 5]", dialects=("aten",),
                 prepare=_of_the_same, because="stride [1, 5] would become [3, 1]"),
        declines(lambda a, b: [a.bmm(b).mT[0]], "f32[1, 256, 1024]", "f32[1, 1024, 256]", **BACKWARD,
                 because="would cost"),
        declines(lambda a, b: [a.bmm(b).permute(0, 2, 1)[1] + 1], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
        declines(lambda a, b: [a.bmm(b).permute(2, 1, 0)[1]], "f32[2, 3, 4]", "f32[2, 4, 5]", **BACKWARD),
    ]  # fmt: skip


def _is_returned_part(program: Program, node: Node) -> bool:
    call = program.call(node)
    return call is not None and call.op == "select" and all(user.op == "output" for user in node.users)
