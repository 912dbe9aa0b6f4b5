"""From a softmax up to the products that its operand may be computed from."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from .contraction import contraction_of
from .layout import VIEWS
from .read_scores import SPELLINGS
from .sinks import joined_with_sink

SEARCHED = 40
"""Search budget: how many nodes to examine above one softmax."""


def paths(program: Program, softmax: Node) -> Iterator[list[Node]]:
    """Ways from a product of two tensors down to the softmax's operand, in depth-first order."""
    call = program.call(softmax)
    assert call is not None
    if isinstance(call.args["self"], Node):
        yield from ways_from_products(program, call.args["self"])


def ways_from_products(program: Program, last: Node) -> Iterator[list[Node]]:
    budget = [SEARCHED]

    def climb(node: Node, below: list[Node]) -> Iterator[list[Node]]:
        budget[0] -= 1
        if budget[0] < 0 or tensor_fact(node) is None:
            return
        if contraction_of(program, node) is not None:
            yield [node, *below]
            return
        call = program.call(node)
        if call is not None and (joined := joined_with_sink(program, call)) is not None:
            yield from climb(joined.scores, [node, *below])
        if call is None or call.mutates or call.op not in SPELLINGS:
            return
        for param in SPELLINGS[call.op].operands:
            operand = call.args.get(param)
            if isinstance(operand, Node) and _full(operand, node, call):
                yield from climb(operand, [node, *below])

    yield from climb(last, [])


def obstacle_above(program: Program, scores: Node) -> Refusal | None:
    """The operation, searched from the operand upwards, that keeps a softmax between two products from being read as
    attention."""
    work: list[tuple[Node, Node | None]] = [(scores, None)]
    seen = 0
    while work and seen < SEARCHED:
        (node, obstacle), seen = work.pop(0), seen + 1
        call = program.call(node)
        if contraction_of(program, node) is not None:
            return None if obstacle is None else _obstacle(program, obstacle)
        if call is not None and tensor_fact(node) is not None:
            spelling = None if call.mutates else SPELLINGS.get(call.op)
            first = obstacle or (None if spelling is not None and spelling.operands else node)
            work += [(n, first) for n in node.all_input_nodes]
    return None


def _obstacle(program: Program, node: Node) -> Refusal:
    call = program.call(node)
    assert call is not None
    return Refusal(f"{call.op} stands between the product and the softmax", at=node)


def _full(operand: Node, node: Node, call: Call) -> bool:
    """Does the operand have an element for each of the result's? Scores do; a tensor that is added to them need not."""
    x, y = tensor_fact(operand), tensor_fact(node)
    if x is None or y is None or not x.dtype.is_floating_point or not y.dtype.is_floating_point:
        return False
    return call.op in VIEWS or known_equal(x.shape, y.shape)
