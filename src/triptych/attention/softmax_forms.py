"""A softmax however it is written: by its name, exp(x - max) / sum, exp(x - logsumexp), exp(log_softmax), softmin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import tensor_fact
from ..ir.gradients import gradient_reaches
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.traits import is_view
from .contraction import contraction_of
from .large_numbers import lost_logarithm
from .layout import VIEWS

SHIFTS = ("amax", "max")
"""Reductions that a softmax may subtract: the result is constant along its dim, and its gradient cancels out."""


@dataclass(frozen=True)
class SoftmaxForm:
    """A softmax, however it is written: its operand, its dim, and the nodes whose work it does."""

    scores: Node
    dim: int
    nodes: Sequence[Node] = ()
    sign: int = 1
    values: Node | None = None
    """The matrix by which the numerator was multiplied before the division, if there is one."""
    dtype: torch.dtype | None = None
    """The dtype to which the scores are cast first."""
    scale: float = 1.0
    """The number by which the scores are multiplied first."""
    problem: Refusal | None = None
    """Why its results may be other than those of a softmax by more than rounding."""


@dataclass(frozen=True)
class Reduction:
    """A sum or a maximum over one dim, which stays as an axis of size one."""

    operand: Node
    dim: int
    nodes: Sequence[Node]


def written_softmax(program: Program, node: Node) -> SoftmaxForm | None:
    """The softmax whose last node this is, if it is written out with exp, sum and similar operations."""
    call = program.call(node)
    if call is None or call.mutates:
        return None
    form = _divided_late(program, node) if call.op == "div" else None
    if form is None and (find := FORMS.get(call.op)) is not None:
        form = find(program, node)
    return form if form is not None and _is_float(form.scores) else None


def named_softmax(program: Program, node: Node) -> SoftmaxForm | None:
    """A softmax over one known dim of a floating-point tensor, called by its name."""
    call = program.call(node)
    if call is None or call.op != "softmax" or call.mutates or not isinstance(call.args.get("dim"), int):
        return None
    scores, result = call.args.get("self"), tensor_fact(node)
    operand = tensor_fact(scores)
    if operand is None or result is None or not operand.dtype.is_floating_point or operand.dim() == 0:
        return None
    dtype = result.dtype if result.dtype != operand.dtype else None
    return SoftmaxForm(scores, call.args["dim"], dtype=dtype)  # type: ignore[arg-type]


def _is_float(node: Any) -> bool:
    known = tensor_fact(node)
    return known is not None and known.dtype.is_floating_point


def _divided_late(program: Program, node: Node) -> SoftmaxForm | None:
    """(exp(x) @ v) / sum(exp(x)), where nothing else reads the product"""
    call = program.call(node)
    assert call is not None
    product, bottom = call.args["self"], call.args["other"]
    contraction = contraction_of(program, product) if isinstance(product, Node) else None
    total = reduction(program, bottom, ("sum",)) if contraction is not None else None
    if contraction is None or total is None or total.operand is not contraction.left:
        return None
    if call.get("rounding_mode") is not None:
        return None
    probabilities = tensor_fact(contraction.left)
    if contraction.alpha != 1 or contraction.added is not None or probabilities is None:
        return None
    last = probabilities.dim() - 1
    ours = program.call(product)
    if ours is None or ours.op != "matmul" or total.dim != last or set(product.users) != {node}:
        return None
    if any(u is not product and u not in total.nodes for u in contraction.left.users):
        return None
    inner = _shifted_exp(program, contraction.left, total.dim)
    if inner is None:
        return None
    return SoftmaxForm(inner.scores, inner.dim, [product, *total.nodes, *inner.nodes], values=contraction.right)


def _softmin(program: Program, node: Node) -> SoftmaxForm | None:
    call = program.call(node)
    assert call is not None
    dim, scores = call.args.get("dim"), call.args.get("input")
    known = tensor_fact(scores)
    if not isinstance(dim, int) or known is None or call.args.get("dtype") is not None:
        return None
    return SoftmaxForm(scores, dim % known.dim(), [], -1)  # type: ignore[arg-type]


def _exp_over_sum(program: Program, node: Node) -> SoftmaxForm | None:
    call = program.call(node)
    assert call is not None
    top, bottom = call.args["self"], call.args["other"]
    total = reduction(program, bottom, ("sum",))
    if total is None or total.operand is not top or call.get("rounding_mode") is not None:
        return None
    form = _shifted_exp(program, top, total.dim)
    if form is None:
        return None
    return SoftmaxForm(form.scores, form.dim, [*total.nodes, *form.nodes])


def _exp_by_reciprocal(program: Program, node: Node) -> SoftmaxForm | None:
    """exp(x) * (1 / sum(exp(x)))"""
    call = program.call(node)
    assert call is not None
    for top, factor in ((call.args["self"], call.args["other"]), (call.args["other"], call.args["self"])):
        inner = program.call(factor) if isinstance(factor, Node) else None
        if inner is None or inner.mutates or not _is_reciprocal(inner):
            continue
        total = reduction(program, inner.args["self"], ("sum",))
        form = None if total is None or total.operand is not top else _shifted_exp(program, top, total.dim)
        if total is not None and form is not None:
            return SoftmaxForm(form.scores, form.dim, [factor, *total.nodes, *form.nodes])
    return None


def _is_reciprocal(call: Call) -> bool:
    if call.op == "pow":
        return not isinstance(call.args["exponent"], Node) and call.args["exponent"] == -1
    return call.op == "reciprocal" or (call.op == "rdiv" and call.args["other"] == 1)


def _shifted_exp(program: Program, node: Any, dim: int) -> SoftmaxForm | None:
    """exp(x - max(x)), or exp(x) of a product to which nothing was added: no row of that is all zero, unless the
    product overflows."""
    if (form := exp_less_maximum(program, node, dim)) is not None:
        return form
    exp = exp_operand(program, node)
    return SoftmaxForm(exp, dim, [node]) if exp is not None and is_bare_product(program, exp) else None


def exp_less_maximum(program: Program, node: Any, dim: int) -> SoftmaxForm | None:
    """exp(x - max(x)), the numerator of a softmax over one dim; the form covers these nodes."""
    less = exp_operand(program, node)
    call = program.call(less) if less is not None else None
    if less is None or call is None or call.op != "sub" or call.get("alpha") != 1:
        return None
    scores, highest = call.args["self"], reduction(program, call.args["other"], SHIFTS)
    if highest is None or highest.operand is not scores or highest.dim != dim:
        return None
    return SoftmaxForm(scores, dim, [node, less, *highest.nodes])


def exp_operand(program: Program, node: Any) -> Node | None:
    """The operand of a node that is an exponential."""
    call = program.call(node) if isinstance(node, Node) else None
    if call is None or call.op != "exp" or call.mutates or not isinstance(call.args["self"], Node):
        return None
    return call.args["self"]


def is_bare_product(program: Program, node: Any) -> bool:
    while isinstance(node, Node):
        if (product := contraction_of(program, node)) is not None:
            return product.added is None
        call = program.call(node)
        if call is None or call.mutates or call.op not in ("mul", "div", "to", *VIEWS):
            return False
        if isinstance(call.args.get("other"), Node):
            return False
        node = call.args["self"]
    return False


def _exp_of_log(program: Program, node: Node) -> SoftmaxForm | None:
    call = program.call(node)
    assert call is not None
    inner_node = call.args["self"]
    inner = program.call(inner_node) if isinstance(inner_node, Node) else None
    if inner is None or inner.mutates:
        return None
    if inner.op == "log_softmax" and inner.get("dtype") is None and isinstance(inner.args.get("dim"), int):
        return SoftmaxForm(inner.args["self"], inner.args["dim"], [inner_node])
    if inner.op == "sub" and inner.get("alpha") == 1:
        scores, shift = inner.args["self"], inner.args["other"]
        total = reduction(program, shift, ("logsumexp",))
        if total is not None and total.operand is scores and _goes_into_products(program, node):
            nodes = [inner_node, *total.nodes]
            return SoftmaxForm(scores, total.dim, nodes, problem=lost_logarithm(program, scores, total.dim))
    return None


def _goes_into_products(program: Program, node: Node) -> bool:
    """Is every row of the value summed up by a product, whatever view or cast comes first?

    In a row with a score of +inf, exp(x - logsumexp(x)) is NaN there and zero elsewhere, and a softmax is NaN
    everywhere: after a product over the row both are NaN.
    """
    work, seen = [node], {node}
    while work:
        for user in work.pop().users:
            call = program.call(user)
            if user in seen or contraction_of(program, user) is not None:
                continue
            if call is None or call.mutates or not (is_view(call.op) or call.op in ("to", "dropout")):
                return False
            seen.add(user)
            work.append(user)
    return True


FORMS: dict[str, Callable[[Program, Node], SoftmaxForm | None]] = {
    "div": _exp_over_sum,
    "mul": _exp_by_reciprocal,
    "exp": _exp_of_log,
    "torch.nn.functional.softmin": _softmin,
}


def reduction(program: Program, node: Any, ops: tuple[str, ...]) -> Reduction | None:
    """A reduction over one dim that is kept as an axis, or the first result of such a reduction.

    `detach` may block the gradient of a maximum, which only shifts the scores of a row. A sum and a logsumexp are the
    denominator: without their gradient this is not a softmax, unless no gradient is needed.
    """
    nodes: list[Node] = []
    kept_at: int | None = None
    cut = False
    while isinstance(node, Node):
        nodes.append(node)
        call = program.call(node)
        if call is None or call.mutates:
            return None
        if call.op == "detach" or (call.op == "getitem" and call.args["index"] == 0):
            cut = cut or call.op == "detach"
            node = call.args["self"]
            continue
        if call.op == "unsqueeze" and kept_at is None:
            kept_at, node = call.args["dim"], call.args["self"]
            continue
        dim = call.get("dim")
        dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
        operand = call.args.get("self")
        if call.op not in ops or call.args.get("dtype") is not None or "other" in call.args:
            return None
        known = tensor_fact(operand)
        if not isinstance(operand, Node) or known is None or len(dims) != 1 or not isinstance(dims[0], int):
            return None
        if cut and call.op not in SHIFTS and gradient_reaches(program, operand):
            return None
        over = dims[0] % known.dim()
        if (call.get("keepdim") is True) == (kept_at is not None) or (
            kept_at is not None and kept_at % known.dim() != over
        ):
            return None
        return Reduction(operand, over, nodes)
    return None
