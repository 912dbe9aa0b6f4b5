"""Matrix products written as a pointwise product and a sum: before and after a softmax they become contractions."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program
from ..ir.text import RULE
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match
from .paths import paths
from .read_probabilities import goes_into_product
from .rule import AttentionRule

STEPS = 8

ABC = ["f32[2, 6, 8]"] * 2
T: dict[str, Any] = {"dialects": ["torch"]}


def _as_by_hand(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.functional.einsum):
        node.meta[RULE] = ContractionByHand.rule_name()


@dataclass(frozen=True)
class Product:
    """A pointwise product that is summed over one axis, as `einsum` writes it."""

    left: Node
    left_axes: str
    right: Node
    right_axes: str
    result_axes: str
    covered: tuple[Node, ...]


class ContractionByHand(AttentionRule):
    """(q[:, None] * k).sum(-1) before a softmax and (p[..., None] * v).sum(1) behind it -> einsum, up to rounding"""

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        for total in _sums_around(program, node) if self.softmax(program, node) is not None else ():
            if (product := _as_product(program, total)) is not None:
                yield Match.at(program, total, covers=product.covered, product=product)

    def rewrite(self, op, product):
        rank = len(product.result_axes) + 1
        x = _without_ones(op, product.left, product.left_axes, rank)
        y = _without_ones(op, product.right, product.right_axes, rank)
        return op.einsum(f"{product.left_axes},{product.right_axes}->{product.result_axes}", [x, y])

    examples = [
        fires(lambda q, k, v: (q[:, None] * k).sum(-1).softmax(-1)[:, None] @ v, "f32[2, 8]", *ABC, **T),
        fires(lambda q, k, v: ((q[:, None] * k).sum(-1).softmax(-1)[..., None] * v).sum(1), "f32[2, 8]", *ABC, **T),
        fires(lambda q, k, v: (torch.einsum("bd,bkd->bk", q, k).softmax(-1).unsqueeze(-1) * v).sum(1), "f32[2, 8]",
              *ABC, **T),
        declines(lambda q, k, v: (lambda p: p * p.exp() + v.sum())((q[:, None] * k).sum(-1).softmax(-1)), "f32[2, 8]",
                 *ABC, **T),
        declines(lambda q, k, v: (q[:, None].relu().softmax(-1)[..., None] * v[:, None]).sum(1) + k.sum(), "f32[2, 6]",
                 *ABC, **T),
        declines(lambda q, k, v: (q[:, None] * k).sum(-1) @ v, "f32[2, 8]", "f32[2, 6, 8]", "f32[6, 8]", **T),
    ]  # fmt: skip


class PointwiseAgain(AttentionRule):
    """einsum -> (q[:, None] * k).sum(-1) as it was written, where no attention was made of it

    A product with a vector for each element of a batch is slower by a GEMM kernel, and not part of the kernels beside
    it. Experts weighted by their gates look like attention, and are not.
    """

    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        call = program.call(node) if node.meta.get(RULE) == ContractionByHand.rule_name() else None
        if call is not None and call.op == "einsum":  # that rule may also have added a reshape
            yield Match.at(program, node)

    def rewrite(self, op, m):
        call = op.program.call(m.node)
        equation, operands = (call.args[name] for name in ("equation", "tensors"))
        terms, _, result = equation.partition("->")
        letters = sorted({*terms} - {","})
        x, y = (_stretched(op, n, axes, letters) for n, axes in zip(operands, terms.split(",")))
        (over,) = {*letters} - {*result}
        return op.sum(op.mul(x, y), dim=[letters.index(over)])

    examples = [
        fires(lambda p, v: torch.einsum("ab,abc->ac", p.softmax(-1), v), "f32[2, 6]", ABC[0], prepare=_as_by_hand, **T),
        fires(lambda q, k: torch.einsum("bd,abd->ab", q, k).softmax(-1), "f32[6, 8]", ABC[0], prepare=_as_by_hand, **T),
        declines(lambda p, v: torch.einsum("ab,abc->ac", p.softmax(-1), v), "f32[2, 6]", ABC[0], **T),
    ]  # fmt: skip


def _stretched(op: Emitter, operand: Any, axes: str, letters: Sequence[str]) -> Any:
    for place, letter in enumerate(letters):
        if letter not in axes:
            operand = op.unsqueeze(operand, place)
    return operand


def _sums_around(program: Program, softmax: Node) -> list[Node]:
    """The sums before and after a softmax that are in the places of an attention's two products."""
    is_product = next(paths(program, softmax), None) is not None
    above = None if is_product else _sum_above(program, softmax)
    if above is None and not is_product:
        return []  # not a softmax of scores: the sum that it weights stays as it is
    below = None
    if not goes_into_product(program, softmax):
        below = _sum_below(program, softmax)
        if below is None:
            return []
    return [node for node in (above, below) if node is not None]


def _sum_above(program: Program, node: Any) -> Node | None:
    """The sum that the scores are computed from, through additions, multiplications and masks."""
    for _ in range(STEPS):
        call = program.call(node) if isinstance(node, Node) else None
        if call is None or call.mutates:
            return None
        if call.op == "sum":
            return node
        if call.op not in ("softmax", "mul", "div", "add", "sub", "masked_fill", "where", "to"):
            return None
        node = call.args["self"]
    return None


def _sum_below(program: Program, node: Node) -> Node | None:
    for _ in range(STEPS):
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
        call = program.call(node)
        if call is None or call.mutates:
            return None
        if call.op == "sum":
            return node
        if call.op not in ("unsqueeze", "reshape", "mul", "to", "dropout"):
            return None
    return None


def _as_product(program: Program, node: Node) -> Product | None:
    call = program.call(node)
    assert call is not None
    product = call.args["self"]
    inner = program.call(product) if isinstance(product, Node) else None
    dim = call.get("dim")
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    whole, total = tensor_fact(product), tensor_fact(node)
    if inner is None or inner.op != "mul" or inner.mutates or len(product.users) != 1 or whole is None or total is None:
        return None
    if len(dims) != 1 or not isinstance(dims[0], int) or call.get("keepdim") or call.get("dtype") is not None:
        return None
    rank, over = whole.dim(), dims[0] % whole.dim()
    if rank > len(string.ascii_lowercase) or total.dtype != whole.dtype:
        return None
    sides = [_axes(inner.args[name], whole) for name in ("self", "other")]
    if any(s is None for s in sides):
        return None
    (left, left_axes), (right, right_axes) = sides  # type: ignore[misc]
    letter = string.ascii_lowercase[over]
    if letter not in left_axes or letter not in right_axes:
        return None
    result = string.ascii_lowercase[:rank].replace(letter, "")
    if set(result) - set(left_axes) - set(right_axes) or set(result) <= set(left_axes) & set(right_axes):
        return None
    device = total.device
    if program.autocast_dtype(node, device) is not None:  # autocast would round a product, but not this
        return None
    unsqueezed = [x for x in (left, right) if len(x.users) == 1 and (c := program.call(x)) and c.op == "unsqueeze"]
    return Product(left, left_axes, right, right_axes, result, (product, *unsqueezed))


def _axes(operand: Any, whole: Any) -> tuple[Node, str] | None:
    """The axes of the product that an operand has, as letters; it is broadcast along the others."""
    tensor = tensor_fact(operand)
    if not isinstance(operand, Node) or tensor is None or tensor.dtype != whole.dtype:
        return None
    first = whole.dim() - tensor.dim()
    letters = ""
    for letter, size, full in zip(string.ascii_lowercase[first:], tensor.shape, whole.shape[first:]):
        if known_equal(size, full):
            letters += letter
        elif not known(size == 1):
            return None
    return operand, letters


def _without_ones(op: Emitter, operand: Node, axes: str, rank: int) -> Any:
    """An operand without the axes along which it is broadcast; other axes of size one stay."""
    tensor = tensor_fact(operand)
    assert tensor is not None
    letters = string.ascii_lowercase[rank - tensor.dim() : rank]
    stretched = [place for place, letter in enumerate(letters) if letter not in axes]
    if not stretched:
        return operand
    call = op.program.call(operand)
    if call is not None and call.op == "unsqueeze" and not call.mutates:
        if [call.args["dim"] % tensor.dim()] == stretched:
            return call.args["self"]
    return op.reshape(operand, [size for size, letter in zip(tensor.shape, letters) if letter in axes])
