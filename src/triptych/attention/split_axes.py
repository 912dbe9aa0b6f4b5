"""Scores whose axes are split temporarily, to add one bias for the rows and one for the columns of an image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match
from .contraction import contraction_of
from .rule import AttentionRule

LONGEST = 8

IMAGE = ["f32[2, 16, 8]", "f32[2, 16, 8]", "f32[2, 4, 4, 4]", "f32[2, 4, 4, 4]"]
T: dict[str, Any] = {"dialects": ["torch"]}


class BiasOfSplitAxes(AttentionRule):
    """(s.view(b, h, w, h, w) + rows + columns).view(s.shape) -> s + (rows + columns).reshape(s.shape), up to rounding,
    for a product s"""

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        wanted = tensor_fact(node)
        chain = _sums(program, node) if _is_reshape(program, node) else []
        if wanted is None or not chain:
            return
        start = program.call(chain[-1][0])
        assert start is not None
        scores, split = tensor_fact(start.args["self"]), tensor_fact(chain[-1][0])
        if scores is None or split is None or not known_equal(scores.shape, wanted.shape):
            return
        if scores.dtype != wanted.dtype or split.dim() <= scores.dim() or not _is_product(program, start.args["self"]):
            return
        if known_equal(split.shape[-2:], scores.shape[-2:]):  # a bias per window, which need not be expanded for that
            return
        added = [(other, sign) for _, other, sign in reversed(chain[:-1])]
        covers = [n for n, _, _ in chain]
        yield Match.at(program, node, covers=covers, scores=start.args["self"], added=added, shape=list(split.shape))

    def rewrite(self, op, m, scores, added, shape):
        total: Value | None = None
        for other, sign in added:
            signed = other if sign == 1 else op.neg(other)
            total = signed if total is None else op.add(total, signed)
        assert total is not None
        if not known_equal(total.shape, shape):
            total = op.expand(total, shape)
        return op.add(scores, op.reshape(total, list(m.root.shape)))

    examples = [
        fires(lambda q, k, a, b: ((q @ k.mT).view(2, 4, 4, 4, 4) + a[..., None] + b[:, :, :, None]).view(2, 16, 16),
              *IMAGE, **T),
        fires(lambda q, k, a, b: ((q @ k.mT * 0.3).view(2, 4, 4, 4, 4) - a[..., None] + b[:, :, :, None])
              .view(2, 16, 16), *IMAGE, **T),
        declines(lambda q, k, a, b: (q.view(2, 4, 4, 8) + a[..., :1] + b[..., :1]).view(2, 16, 8) @ k.mT, *IMAGE, **T),
        declines(lambda q, k, a, b: ((q @ k.mT).view(1, 2, 16, 16) + a.sum()).view(2, 16, 16) + b.sum(), *IMAGE, **T),
    ]  # fmt: skip


def _sums(program: Program, node: Node) -> list[tuple[Node, Any, int]]:
    """The sums above a reshape, each with the added tensor and its sign, up to the reshape that split the axes; empty
    if the graph has another form."""
    call = program.call(node)
    sums: list[tuple[Node, Any, int]] = []
    while call is not None and len(sums) < LONGEST:
        inner = call.args["self"]
        if not isinstance(inner, Node) or len(inner.users) != 1:
            return []
        call = program.call(inner)
        if _is_reshape(program, inner):
            return [*sums, (inner, None, 0)] if sums else []
        if call is None or call.mutates or call.op not in ("add", "sub") or call.get("alpha") != 1:
            return []
        left, right = tensor_fact(call.args["self"]), tensor_fact(call.args["other"])
        whole = tensor_fact(inner)
        if left is None or right is None or whole is None or not known_equal(left.shape, whole.shape):
            return []
        sums.append((inner, call.args["other"], 1 if call.op == "add" else -1))
    return []


def _is_reshape(program: Program, node: Node) -> bool:
    call = program.call(node)
    return call is not None and call.op == "reshape" and not call.mutates


def _is_product(program: Program, node: Any) -> bool:
    """A product of matrices, or a multiple of one."""
    for _ in range(LONGEST):
        if not isinstance(node, Node):
            return False
        if contraction_of(program, node) is not None:
            return True
        call = program.call(node)
        if call is None or call.mutates or call.op not in ("mul", "div", "to"):
            return False
        node = call.args["self"]
    return False
