"""A softmax whose scale is applied after its maximum was subtracted.

The joint stage leaves softmax(x * s) as exp((x - max(x)) * s) / sum, with the minimum instead of the maximum where s is
negative (`mul_softmax_pattern`, `div_softmax_pattern`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from ..ir.program import Program
from .softmax_forms import SoftmaxForm, exp_operand, reduction


def scaled_softmax(program: Program, node: Node) -> SoftmaxForm | None:
    """The softmax of this form whose last node this is."""
    call = program.call(node)
    if call is None or call.op != "div" or call.mutates or call.get("rounding_mode") is not None:
        return None
    exp, total = call.args["self"], reduction(program, call.args["other"], ("sum",))
    scaled = exp_operand(program, exp) if total is not None and total.operand is exp else None
    difference, scale = _scaled(program, scaled)
    call = None if difference is None else program.call(difference)
    if total is None or scale is None or call is None or call.op != "sub" or call.mutates or call.get("alpha") != 1:
        return None
    scores = call.args["self"]
    for highest, nodes in _where_finite(program, call.args["other"], scale):
        extreme = reduction(program, highest, ("amax" if scale > 0 else "amin",))
        if extreme is not None and extreme.dim == total.dim and extreme.operand in (scores, _uncast(program, scores)):
            covered = [*total.nodes, exp, scaled, difference, *nodes, *extreme.nodes]
            return SoftmaxForm(scores, total.dim, covered, scale=scale)
    return None


def _scaled(program: Program, node: Any) -> tuple[Node | None, float | None]:
    """The tensor and the number that a node is the product of."""
    call = program.call(node) if isinstance(node, Node) else None
    if call is None or call.mutates or call.op not in ("mul", "div") or call.get("rounding_mode") is not None:
        return None, None
    operand, number = call.args["self"], call.args["other"]
    if not isinstance(operand, Node) or not isinstance(number, (int, float)) or not number:
        return None, None
    return operand, float(number) if call.op == "mul" else 1 / number


def _where_finite(program: Program, highest: Any, scale: float) -> Iterator[tuple[Any, list[Any]]]:
    """The highest score h of each row, and the nodes between it and `highest`. `highest` may be h + 0 * (h * s), which
    is NaN where h * s is not finite."""
    yield _uncast(program, highest), [highest]
    call = program.call(highest) if isinstance(highest, Node) else None
    if call is None or call.op != "add" or call.mutates or call.get("alpha") != 1:
        return
    plain, added = call.args["self"], call.args["other"]
    nothing = program.call(added) if isinstance(added, Node) else None
    if nothing is None or nothing.op != "mul" or nothing.mutates or nothing.args["other"] != 0:
        return
    product = _uncast(program, nothing.args["self"])
    operand, number = _scaled(program, product)
    if number == scale and operand is not None and operand is _uncast(program, plain):
        yield operand, [highest, plain, added, nothing.args["self"], product]


def _uncast(program: Program, node: Any) -> Any:
    """The operand of a cast, or the value itself. Rounding keeps the order, so the highest score is the same one."""
    call = program.call(node) if isinstance(node, Node) else None
    is_cast = call is not None and call.op == "to" and not call.mutates and set(call.args) <= {"self", "dtype"}
    return call.args["self"] if call is not None and is_cast else node
