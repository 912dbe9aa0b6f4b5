"""Rules that prepare a graph for the fusion: they remove uses of scores and probabilities that nothing needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.facts import fact, tensor_fact
from ..ir.program import Program
from ..ir.traits import is_gemm
from ..ir.values import knowledge
from ..rewrite.edits import Erase, EraseUnused, ReplaceAll, Together
from ..rewrite.examples import declines, fires
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match
from .contraction import contraction_of
from .paths import ways_from_products
from .read_probabilities import goes_into_product
from .rule import AttentionRule

QKV = ["f32[2, 6, 8]"] * 3
T: dict[str, Any] = {"dialects": ["torch"]}


def _without_autocast(q: Any, k: Any, v: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        scores = q @ k.mT
    return scores.softmax(-1) @ v


def _in_half_precision(q: Any, k: Any, v: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        scores = q @ k.mT
    return scores.float().softmax(-1) @ v


def _of_two_dtypes(q: Any, k: Any, w: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        scores = F.linear(q, w)
    return (scores @ k.mT).softmax(-1)


def _mean_unread(q: Any, k: Any, v: Any) -> Any:
    weights = (q @ k.mT).softmax(-1)
    weights.mean(0)
    return weights @ v


def _draw_unread(q: Any, k: Any, v: Any) -> Any:
    weights = (q @ k.mT).softmax(-1)
    F.dropout(weights, 0.5)
    return weights @ v


class IdleRegion(AttentionRule):
    """with autocast: f(x) -> f(x), where all of f is computed as it would be without"""

    exact = True

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        if getattr(node.target, "__name__", "") != "_enter_autocast" or len(node.users) != 1:
            return
        if _changes_nothing(program, node, next(iter(node.users))):
            yield Match.at(program, node)

    def rewrite(self, op, m):
        return Erase([*m.root.node.users, m.root.node])

    examples = [
        fires(_without_autocast, *QKV, **T),
        declines(_in_half_precision, *QKV, **T),
        declines(_of_two_dtypes, "bf16[2, 6, 8]", "bf16[2, 6, 8]", "f32[8, 8]", **T),
        declines(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *QKV, **T),
    ]  # fmt: skip


class Unread(AttentionRule):
    """f(q @ k.mT) that nobody reads -> nothing, as the mean of the weights over the heads, computed and not returned"""

    exact = True

    def nodes(self, program: Program) -> list[Node]:
        """Nodes that are computed from a product, the latest first."""
        below: dict[Node, None] = {}
        for node in program.graph.nodes:
            if contraction_of(program, node) is not None or any(n in below for n in node.all_input_nodes):
                below[node] = None
        return list(reversed(below))

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        if not node.users and node.op != "output" and program.aliasing.effects(node).pure:
            yield Match.at(program, node)

    def rewrite(self, op, m):
        return Erase([m.root.node])

    examples = [
        fires(_mean_unread, *QKV, **T),
        declines(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *QKV, **T),
        declines(_draw_unread, *QKV, **T),
    ]  # fmt: skip


def _changes_nothing(program: Program, start: Node, end: Node) -> bool:
    """Would the operations of the region give the same dtypes outside it? Autocast rounds the operands of products, or
    widens operands, which shows in the dtype of the result, or else in operands of several dtypes: without autocast, a
    product of these is an error that not all computations on fake tensors report."""
    if start.args[2:3] == (False,) and program.autocast_dtype(start, torch.device(str(start.args[0]))) is None:
        return True
    node = start.next
    while node is not end:
        call = program.call(node)
        if node.op == "root" or call is None or call.mutates or program.aliasing.effects(node).barrier:
            return False
        was, now = fact(node), program.compute(node, at=start)
        if [_dtype(x) for x in _flat(was)] != [_dtype(x) for x in _flat(now)]:
            return False
        operands = [t for n in node.all_input_nodes if (t := tensor_fact(n)) is not None]
        if is_gemm(call.op) and len({t.dtype for t in operands}) > 1:
            return False
        node = node.next
    return True


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else type(value)


class ShapeOfScores(AttentionRule):
    """full_like(scores, 1) -> full(shape, 1), and scores.size(3) -> key.size(2): a shape needs no scores"""

    exact = True

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        form = self.softmax(program, node)
        if form is None or not goes_into_product(program, node):
            return
        above = dict.fromkeys(n for path in ways_from_products(program, form.scores) for n in path)
        for scores, user in [(n, user) for n in above for user in n.users]:
            call = program.call(user) if not user._erased else None
            if call is None or call.mutates or call.args.get("self") is not scores:
                continue
            if call.op == "full_like" and not set(call.args) - {"self", "fill_value", "dtype", "device"}:
                if tensor_fact(user) is not None and not isinstance(call.args["fill_value"], Node):
                    yield Match.at(program, user, call=call)
            elif call.op in ("size", "sym_size"):
                sizes = list(user.users) if isinstance(fact(user), tuple) else [user]
                for size in sizes:
                    if isinstance(fact(size), torch.SymInt):
                        yield Match.at(program, size, call=call, size=user)

    def rewrite(self, op, m, call, size):
        if size is None:
            old = m.root.tensor
            return op.full(list(old.shape), call.args["fill_value"], dtype=old.dtype, device=old.device)
        number = Replacement((m.root.node,), op.size_node(m.root.fact), op, m.nodes, self)
        return Together([ReplaceAll([number]), EraseUnused([size.node])])

    examples = [
        fires(lambda q, k, v: (lambda s: torch.where(s > 0, s, torch.full_like(s, -1e9)).softmax(-1) @ v)(q @ k.mT),
              *QKV, **T),
        fires(lambda q, k, v: (lambda s: torch.where(s > 0, s, torch.full_like(s, -1e9)).softmax(-1) @ v)(q @ k.mT),
              *QKV, **T, dynamic=True),
        declines(lambda q, k, v: (lambda s: s.softmax(-1) @ v + torch.full_like(v, 1.0))(q @ k.mT), *QKV, **T),
        declines(lambda q, k, v: (lambda s: s.softmax(-1).sum() + torch.full_like(s, 1.0))(q @ k.mT), *QKV, **T),
    ]  # fmt: skip


class ZeroForNan(AttentionRule):
    """p.masked_fill(isnan(p), 0) -> nan_to_num(p, 0), which leaves infinity"""

    exact = True

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        call = program.call(node)
        if call is None or call.mutates or call.op not in ("masked_fill", "where"):
            return
        names = ("self", "mask", "value") if call.op == "masked_fill" else ("other", "condition", "self")
        if any(name not in call.args for name in names):  # `where(mask)` returns indices
            return
        value, mask, number = (call.args[name] for name in names)
        test = program.call(mask) if isinstance(mask, Node) else None
        if test is None or test.mutates or tensor_fact(node) is None or knowledge(program).number(number) != 0:
            return
        is_nan = test.op == "isnan" or (test.op == "ne" and test.args.get("other") is value)
        if not isinstance(value, Node) or self.softmax(program, value) is None:
            return
        if is_nan and test.args.get("self") is value:
            constants = [source for source, _ in knowledge(program).sources(number)]
            yield Match.at(program, node, covers=[mask, *constants], value=value)

    def rewrite(self, op, value):
        return op.nan_to_num(value, 0.0, math.inf, -math.inf)

    examples = [
        fires(lambda x: (lambda p: p.masked_fill(p.isnan(), 0.0))(x.softmax(-1)), "f32[2, 6]", **T),
        fires(lambda x: (lambda p: torch.where(p != p, 0.0, p))(x.softmax(-1)), "f32[2, 6]", **T),
        declines(lambda x: (lambda p: p.masked_fill(p.isnan(), 1.0))(x.softmax(-1)), "f32[2, 6]", **T),
        declines(lambda x: x.masked_fill(x.isnan(), 0.0), "f32[2, 6]", **T),
    ]  # fmt: skip
