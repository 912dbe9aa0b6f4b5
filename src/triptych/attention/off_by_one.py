"""exp(x) / (1 + sum(exp(x))), with or without a shift: a softmax with a sink that is zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match
from .paths import ways_from_products
from .read_probabilities import goes_into_product
from .rule import AttentionRule
from .softmax_forms import SHIFTS, SoftmaxForm, is_bare_product, reduction

QKV = ["f32[2, 6, 8]"] * 3
T: dict[str, Any] = {"dialects": ["torch"]}


def _shifted_by_maximum(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    highest = scores.amax(-1, True)
    e = torch.exp(scores - highest)
    return e / (torch.exp(-highest) + e.sum(-1, True)) @ v


class SoftmaxOffByOne(AttentionRule):
    """exp(x - m) / (exp(-m) + sum(exp(x - m))) -> softmax(cat([x, 0]))[..., :-1], where attention follows"""

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        form = _form(program, node)
        result, scores = tensor_fact(node), tensor_fact(form.scores) if form is not None else None
        if form is None or result is None or scores is None or not known_equal(result.shape, scores.shape):
            return
        if not scores.dtype.is_floating_point or next(ways_from_products(program, form.scores), None) is None:
            return
        if goes_into_product(program, node):
            yield Match.at(program, node, covers=form.nodes, form=form)

    def rewrite(self, op, form):
        x = Value(op.program, form.scores)
        column = [1 if d == form.dim else s for d, s in enumerate(x.shape)]
        combined = op.cat([x, op.full(column, 0.0, dtype=x.dtype, device=x.device)], dim=form.dim)
        return op.slice(op.softmax(combined, form.dim), form.dim, 0, x.shape[form.dim])

    examples = [
        fires(lambda q, k, v: (lambda e: e / (1 + e.sum(-1, True)))(torch.exp(q @ k.mT)) @ v, *QKV, **T),
        fires(_shifted_by_maximum, *QKV, **T),
        fires(_shifted_by_maximum, *QKV, **T, dynamic=True),
        declines(lambda q, k, v: (lambda e: e / (2 + e.sum(-1, True)))(torch.exp(q @ k.mT)) @ v, *QKV, **T),
        declines(lambda x: (lambda e: e / (1 + e.sum(-1, True)))(torch.exp(x)), "f32[6, 8]", **T),
        declines(lambda q, k, v: (lambda e: e / (1 + e.sum(-1, True)))(torch.exp(q @ k.mT)).sum() + v, *QKV, **T),
    ]  # fmt: skip


def _form(program: Program, node: Node) -> SoftmaxForm | None:
    call = program.call(node)
    if call is None or call.op != "div" or call.mutates or call.get("rounding_mode") is not None:
        return None
    top, bottom = call.args["self"], call.args["other"]
    exp, added = (_call(program, n) for n in (top, bottom))
    if exp is None or exp.op != "exp" or added is None or added.op != "add" or added.get("alpha") != 1:
        return None
    for whole, one in ((added.args["self"], added.args["other"]), (added.args["other"], added.args["self"])):
        total = reduction(program, whole, ("sum",))
        if total is not None and total.operand is top:
            inner = exp.args["self"]
            if isinstance(one, (int, float)):
                return SoftmaxForm(inner, total.dim, [top, bottom, *total.nodes]) if one == 1 else None
            return _shifted(program, inner, one, SoftmaxForm(inner, total.dim, [top, bottom, *total.nodes, one]))
    return None


def _shifted(program: Program, inner: Any, one: Any, form: SoftmaxForm) -> SoftmaxForm | None:
    """exp(x - m) together with exp(-m), where m is the maximum of x, perhaps clamped from below. Without the clamp, no
    row of x may be -inf everywhere: m would be infinite there."""
    less, exp = _call(program, inner), _call(program, one)
    if less is None or exp is None or less.op != "sub" or less.get("alpha") != 1 or exp.op != "exp":
        return None
    negative, (scores, shift) = exp.args["self"], (less.args["self"], less.args["other"])
    opposite = _call(program, negative)
    if opposite is None or opposite.op != "neg" or opposite.args["self"] is not shift or not isinstance(scores, Node):
        return None
    clamped = _call(program, shift)
    bounded = clamped is not None and clamped.op == "clamp" and isinstance(clamped.args.get("min"), (int, float))
    highest = reduction(program, clamped.args["self"] if bounded and clamped else shift, SHIFTS)
    if highest is None or highest.operand is not scores or highest.dim != form.dim:
        return None
    if not bounded and not is_bare_product(program, scores):
        return None
    return SoftmaxForm(scores, form.dim, [*form.nodes, inner, negative, shift, *highest.nodes])


def _call(program: Program, node: Any) -> Call | None:
    call = program.call(node) if isinstance(node, Node) else None
    return None if call is None or call.mutates else call
