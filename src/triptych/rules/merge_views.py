"""Rules, shared by several stages, that merge two views in a row into one view, or drop both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program
from ..match.pattern import Ints, Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Rule


def keeps_order(call: Call | None) -> bool:
    """Does the view keep the elements in order and change only the shape? The result of two such views is determined by
    its shape."""
    if call is None or call.mutates:
        return False
    if call.op == "permute":  # the position of a dim of size 1 does not matter
        shape = getattr(tensor_fact(call.args["self"]), "shape", None)
        dims = call.args["dims"]
        longer = [d for d in dims if shape is not None and not known(shape[d] == 1)]
        return shape is not None and longer == sorted(longer)
    return call.op in ("reshape", "squeeze", "unsqueeze")


class MergeReshapes(Rule):
    """reshape(reshape(x, a), b) -> reshape(x, b), or x where it has that shape; squeeze and unsqueeze likewise"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, shape, how, first):
        inner = op.reshape(x, first) | op.unsqueeze(x, first) | op.squeeze(x, dim=first) | op.permute(x, first)
        return op.any_of(
            op.reshape(inner, shape), op.unsqueeze(inner, how), op.squeeze(inner, dim=how), op.permute(inner, how)
        )

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        viewed: Any = call.args.get("self")
        inner = program.call(viewed) if isinstance(viewed, Node) else None
        if inner is None or not keeps_order(call) or not keeps_order(inner):
            return False
        if "reshape" in (call.op, inner.op) and len(viewed.users) == 1:
            return True
        x, result = tensor_fact(inner.args.get("self")), tensor_fact(node)
        return x is not None and result is not None and known_equal(result.shape, x.shape)

    def check(self, m, x):
        outer, inner = m.root.call, m.program.call(m.nodes[1])
        m.applies(keeps_order(outer) and keeps_order(inner))
        m.applies(m.root.known and x.known)
        if not known_equal(m.root.shape, x.shape):
            m.applies("reshape" in (outer.op, inner.op), "neither view is a reshape: both stay")
            m.applies(len(m.nodes[1].users) == 1, "the inner view has other users and stays")

    def rewrite(self, op, m, x, shape):
        if known_equal(m.root.shape, x.shape):
            return x
        result = op.reshape(x, m.root.shape if shape is None else shape)
        copies = any(m.program.call(n).op == "clone" for n in op.made if m.program.call(n) is not None)
        m.require(not copies, "x cannot be viewed in this shape without a copy")
        return result

    examples = [
        fires(lambda x: x.view(32).view(8, 4) + 1, "f32[4, 8]"),
        fires(lambda x: x.reshape(2, 16).reshape(4, -1) + 1, "f32[4, 8]"),
        fires(lambda x: x.unsqueeze(0).squeeze(0) + 1, "f32[4, 8]"),
        fires(lambda x: x.squeeze(1).unsqueeze(-1) + 1, "f32[4, 1]"),
        fires(lambda x: x.flatten().unsqueeze(0) + 1, "f32[4, 8]"),
        fires(lambda x: x.transpose(1, 2).reshape(4, 8) + 1, "f32[4, 1, 8]"),
        fires(lambda x: x.view(-1).view(x.shape) + 1, "f32[4, 8]", dynamic=True),
        fires(lambda x: (y := x.view(32), y.view(4, 8) + 1), "f32[4, 8]"),
        fires(lambda x: x.view(0, 4).view(2, 0) + 1, "f32[0, 8]"),
        declines(lambda x: x.t().reshape(32) + 1, "f32[4, 8]"),
        declines(lambda x: x[None, :, None] + 1, "f32[4]"),
        declines(lambda x: (y := x.view(32), y.view(8, 4) + 1), "f32[4, 8]"),
        declines(lambda x: x.view(torch.int32).view(torch.float32) + 1, "f32[4, 8]"),
        declines(lambda x: x.t().reshape(-1).reshape(4, 4) + 1, "f32[4, 4]", because="stride", dialects=("torch",)),
        declines(lambda x: x.view(32).view(4, 8), "f32[4, 8]", because="very tensor"),
    ]


def composed(first: Sequence[int], then: Sequence[int]) -> list[int]:
    """The dims of the permutation that is equivalent to `first` followed by `then`."""
    return [first[d] for d in then]


class MergePermutes(Rule):
    """permute(permute(x, a), b) -> permute(x, a[b]), or x where they cancel"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, a: Ints, b: Ints):
        return op.permute(op.permute(x, a), b)

    def check(self, m, a, b):
        m.applies(len(a) == len(b) and min((*a, *b), default=0) >= 0)
        cancel = composed(a, b) == sorted(a)
        m.applies(cancel or len(m.nodes[1].users) == 1, "the inner permute has other users and stays")

    def rewrite(self, op, x, a, b):
        dims = composed(a, b)
        return x if dims == sorted(dims) else op.permute(x, dims)

    examples = [
        fires(lambda x: x.t().t() + 1, "f32[4, 8]"),
        fires(lambda x: x.permute(1, 2, 0).permute(1, 2, 0) + 1, "f32[4, 8, 2]"),
        fires(lambda x: x.transpose(0, -1).movedim(0, 1) + 1, "f32[4, 8, 2]"),
        fires(lambda x: (y := x.t(), y.t() + 1), "f32[4, 8]"),
        fires(lambda x: x.t().mT + 1, "f32[4, 8]", dynamic=True),
        declines(lambda x: (y := x.permute(1, 2, 0), y.permute(1, 2, 0) + 1), "f32[4, 8, 2]"),
        declines(lambda x: x.t().t(), "f32[4, 8]", because="very tensor"),
    ]
