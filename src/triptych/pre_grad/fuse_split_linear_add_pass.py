"""fuse_split_linear_add_pass: a sum of linear layers over the pieces of one value is one layer over the value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Product, Work, read_and_written, size_hint
from ..ir.facts import known_equal, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.sizes import elements
from ..match.pattern import Tensor
from ..pieces.read import only_used_by, way_of
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import NotConcerned
from ..rewrite.rule import Match, Rule
from .joined_products import ProductNode, emit_linear, product_of


@dataclass(frozen=True)
class _Piece:
    """A slice of a value along its last dim."""

    source: Node
    start: Any
    end: Any
    nodes: tuple[Node, ...]
    """The nodes that compute it."""


@dataclass(frozen=True)
class _Sum:
    """The terms of a sum: linear layers over pieces of one value, in the order of the pieces, and the other terms."""

    layers: tuple[tuple[ProductNode, _Piece], ...]
    others: tuple[Node, ...]
    adds: tuple[Node, ...]

    @property
    def source(self) -> Node:
        return self.layers[0][1].source

    @property
    def members(self) -> list[ProductNode]:
        return [member for member, _ in self.layers]

    @property
    def biases(self) -> list[Node]:
        return [m.bias for m in self.members if m.bias is not None]

    @property
    def whole(self) -> bool:
        """Do the pieces cover the value, each element once?"""
        bounds = [0, *(piece.end for _, piece in self.layers)]
        ends = known_equal(bounds[-1], tensor_of(self.source).shape[-1])
        return ends and all(known_equal(end, p.start) for end, (_, p) in zip(bounds, self.layers))

    def nodes(self, root: Node) -> list[Node]:
        inner = [n for member, piece in self.layers for n in (*member.inner, *piece.nodes)]
        users = [*self.adds, *(m.node for m in self.members)]
        return [n for n in (*users, *only_used_by(inner, *users)) if n is not root]


TWO = ("f32[512, 16]", "f32[4, 8]", "f32[4, 8]")


class FuseSplitLinearAdd(Rule):
    """linear(x_1, W_1, b_1) + linear(x_2, W_2, b_2) + ... -> linear(x, cat(W_i, 1), b_1 + b_2 + ...); up to rounding

    The x_i are all pieces of x along its last dim, each of them once, in any order.
    """

    exact = False
    interior_may_be_used = True

    def pattern(self, op, a: Tensor, b: Tensor):
        return op.add(a, b)

    def check(self, m):
        terms = _terms(m.program, m.root.node)
        readings = [_continues(m.program, t, m.root.node) or _layer(m.program, t, m.root.node) for t in terms]
        m.applies(all(readings), "not all terms are layers or sums; a smaller sum may match")
        total = _sum_at(m)
        m.require(total.whole, "the layers are not over all pieces of {at}, once each", at=total.source)
        first = total.members[0]
        odd = next((member.weight for member in total.members if member.turned != first.turned), None)
        m.require(odd is None, "the weights are stored in different orientations", at=odd)
        m.cover(total.nodes(m.root.node))
        m.pays(_apart(m.root.node, total), _joined(m.program, m.root.node, total))

    def rewrite(self, op, m):
        total = _sum_at(m)
        first = total.members[0]
        weight = op.cat([member.weight for member in total.members], dim=0 if first.turned else 1)
        bias: Any = total.biases[0] if total.biases else None
        for other in total.biases[1:]:
            bias = op.add(bias, other)
        value = emit_linear(op, first, total.source, weight, bias)
        for other in total.others:
            value = op.add(value, other)
        return value

    examples = [
        fires(lambda x, w, v: (lambda a, b: F.linear(a, w) + F.linear(b, v))(*x.chunk(2, -1)), *TWO,
              dialects=["torch"]),
        fires(lambda x, w, v: (lambda a, b: torch.add(b @ v.t(), a.matmul(w.mT)))(*x.split([8, 8], dim=1)), *TWO),
        fires(lambda x, w, v: (lambda a, b: F.linear(b, v) + F.linear(a, w))(x[:, :8], x.narrow(1, 8, 8)), *TWO,
              dialects=["torch"]),
        fires(lambda x, w, v: (lambda a, b: (a @ w.t()).add(b @ v.t()) + 1)(*x.chunk(2, 1)), *TWO, dynamic=True),
        fires(lambda x, b, w, c, v, u: (lambda p, q, r: F.linear(p, w, b) + (F.linear(q, v, bias=c) + r @ u.t()))(
              *x.split([4, 4, 8], -1)), "f32[64, 4, 16]", "f32[8]", "f32[8, 4]", "f32[8]", "f32[8, 4]", "f32[8, 8]",
              dialects=["torch"]),
        fires(lambda x, w, v: (lambda a, b: x.sum() + F.linear(a, w) + F.linear(b, v))(*x.chunk(2, -1)), *TWO,
              dialects=["torch"]),
        fires(lambda x, w, v: sum(F.linear(p, u) for p, u in zip(x.chunk(2, -1), (w, v))), *TWO, dialects=["torch"]),
        fires(lambda x, w, v: (lambda a, b: a @ w + b @ v)(*x.chunk(2, 1)), "bf16[512, 16]", "bf16[8, 4]",
              "bf16[8, 4]"),
        fires(lambda x, w, v: (lambda a, b: (F.linear(a, w) + F.linear(b, v), a * 2))(*x.chunk(2, -1)), *TWO,
              dialects=["torch"]),
        declines(lambda x, w, v: (lambda a, b: F.linear(a, w) + F.linear(a, v))(*x.chunk(2, -1)), *TWO,
                 dialects=["torch"], because="once each"),
        declines(lambda x, w, v: (lambda a, b, c: F.linear(a, w) + F.linear(c, v))(*x.split([4, 4, 8], -1)),
                 "f32[512, 16]", "f32[4, 4]", "f32[4, 8]", dialects=["torch"], because="once each"),
        declines(lambda x, c, w, v: (lambda a, b: torch.addmm(c, a, w) + b @ v)(*x.chunk(2, 1)), "f32[512, 16]",
                 "f32[512, 4]", "f32[8, 4]", "f32[8, 4]"),
        declines(lambda x, w, v: (lambda a, b: F.linear(a, w) + F.linear(b, v))(*x.chunk(2, 0)), "f32[8, 16]",
                 "f32[4, 16]", "f32[4, 16]", dialects=["torch"]),
        declines(lambda x, w, v: (lambda a, b: (y := F.linear(a, w)) + F.linear(b, v) * y)(*x.chunk(2, -1)), *TWO,
                 dialects=["torch"]),
        declines(lambda x, w, v: (lambda a, b: torch.add(F.linear(a, w), F.linear(b, v), alpha=2))(*x.chunk(2, -1)),
                 *TWO, dialects=["torch"]),
        declines(lambda x, w, v: (lambda a, b: (F.linear(a, w), x.add_(1), F.linear(b, v)))(*x.chunk(2, -1))[0], *TWO,
                 dialects=["torch"]),
        declines(lambda x, w, v: (lambda a, b: _write_between(F.linear(a, w), x, b, v))(*x.chunk(2, -1)), *TWO,
                 dialects=["torch"], because="in between"),
        declines(lambda x, w, v: (lambda a, b: F.linear(a, w) + F.linear(b, v))(*x.chunk(2, -1)), "f32[1, 512]",
                 "f32[256, 256]", "f32[256, 256]", dialects=["torch"], because="would cost"),
    ]  # fmt: skip


LARGEST_SUM = 64
"""Search budget: additions followed from one sum. Keeps the pass linear."""


def _sum_at(m: Match) -> _Sum:
    total = _read_sum(m.program, m.root.node)
    if total is None:
        raise NotConcerned("not a sum of linear layers over pieces of one value")
    return total


def _read_sum(program: Program, root: Node) -> _Sum | None:
    """A sum with at least two layers over pieces of one value, read through additions that nothing else uses."""
    adds, leaves = [root], []
    for add in adds:  # the list grows during the loop
        for term in _terms(program, add):
            if _continues(program, term, root):
                if len(adds) == LARGEST_SUM:
                    return None
                adds.append(term)
            else:
                leaves.append(term)
    linears = [layer for leaf in leaves if (layer := _layer(program, leaf, root)) is not None]
    layers = [layer for layer in linears if layer[1].source is linears[0][1].source]
    if len(layers) < 2 or len(set(leaves)) < len(leaves):
        return None
    others = [leaf for leaf in leaves if leaf not in {member.node for member, _ in layers}]
    ordered = sorted(layers, key=lambda layer: size_hint(layer[1].start))
    return _Sum(tuple(ordered), tuple(others), tuple(adds))


def _continues(program: Program, term: Node, root: Node) -> bool:
    """Is the term an addition that only this sum uses?"""
    return len(term.users) == 1 and _is_like(term, root) and _is_add(program, term)


def _is_add(program: Program, node: Node) -> bool:
    call = program.call(node)
    if call is None or call.op != "add" or call.mutates or "alpha" in call.args:
        return False
    return all(tensor_fact(term) is not None for term in _terms(program, node))


def _terms(program: Program, add: Node) -> list[Any]:
    """The terms of an addition, without the number 0 from which the builtin `sum` starts."""
    call = program.call(add)
    assert call is not None
    sides = (call.args["self"], call.args["other"])
    return [side for side in sides if not (type(side) in (int, float) and side == 0)]


def _is_like(node: Node, root: Node) -> bool:
    value, whole = tensor_fact(node), tensor_fact(root)
    if value is None or whole is None:
        return False
    return value.dtype == whole.dtype and known_equal(value.shape, whole.shape)


def _layer(program: Program, node: Node, root: Node) -> tuple[ProductNode, _Piece] | None:
    """A linear layer over a piece of a value's last dim, whose result only the sum uses."""
    member = product_of(program, node)
    if member is None or len(node.users) != 1 or not _is_like(node, root):
        return None
    way, weight = way_of(program, member.x, frozenset(["split", "slice"])), tensor_fact(member.weight)
    if way is None or not way.nodes or weight is None or weight.dim() != 2:
        return None
    if member.bias is not None and tensor_of(member.bias).dim() != 1:
        return None
    part = way.map.part_along(len(way.map.sizes) - 1)
    return None if part is None else (member, _Piece(way.source, *part, way.nodes))


def _apart(root: Node, total: _Sum) -> Work:
    """The layers and their additions."""
    inner = [size_hint(piece.end - piece.start) for _, piece in total.layers]
    additions = (len(inner) - 1) * [read_and_written(tensor_of(root), times=3)]
    return Work.of(tensor_of(root).device, [_layer_over(root, total, k) for k in inner], additions)


def _joined(program: Program, root: Node, total: _Sum) -> Work:
    """One layer over joined weights."""
    inner = sum(size_hint(piece.end - piece.start) for _, piece in total.layers)
    joined = Work.of(tensor_of(root).device, _layer_over(root, total, inner))
    weights = [member.weight for member in total.members]
    if program.computed_once(*weights, *total.biases):
        return joined
    adding = [read_and_written(tensor_of(bias), times=3) for bias in total.biases[1:]]
    return joined + [read_and_written(*map(tensor_of, weights), times=2), *adding]


def _layer_over(root: Node, total: _Sum, inner: int) -> Product:
    """A layer over so many columns of the value."""
    source = tensor_of(total.source)
    return Product.sized(elements(source.shape[:-1]), size_hint(tensor_of(root).shape[-1]), inner, source.dtype)


def layers_to_join(program: Program) -> set[Node]:
    """Layers that this pass is going to fuse; passes that run before it leave them alone."""
    layers: set[Node] = set()
    for node in program.graph.nodes:
        if not _is_add(program, node) or any(_is_add(program, user) for user in node.users):
            continue  # no sum, or a part of a larger one
        total = _read_sum(program, node)
        if total is None or not total.whole or len({m.turned for m in total.members}) > 1:
            continue
        if _joined(program, node, total).seconds() < _apart(node, total).seconds():
            layers.update(m.node for m in total.members)
    return layers


def _write_between(first: Any, x: Any, piece: Any, weight: Any) -> Any:
    x.add_(1)
    return first + F.linear(piece, weight)


@dataclass(frozen=True)
class FuseSplitLinearAddPass(Pass):
    """Replaces a sum of linear layers over the pieces of one value by one layer over the whole value, with the weights
    concatenated. Up to rounding.

    One product does the work of several and of the additions. The pass declines unless the pieces cover the value,
    each element once.
    """

    name: ClassVar[str] = "fuse_split_linear_add_pass"

    def rules(self) -> Sequence[Rule]:
        return (FuseSplitLinearAdd(),)
