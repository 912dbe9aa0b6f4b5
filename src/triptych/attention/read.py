"""First phase: the operations around a softmax are read into the normal form of an attention. No node is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..cost import size_hint
from ..ir.program import Program
from ..rewrite.refusal import Refused
from .contraction import BROADCAST, Contraction, contraction_of
from .layout import VIEWS, Layout, viewed
from .operands import shape_of
from .read_probabilities import ProbabilityReader
from .read_scores import ScoreReader, is_plain_number
from .rule import is_decomposed
from .softmax_forms import SoftmaxForm
from .terms import Attention, product_layout


@dataclass(frozen=True)
class Surroundings:
    """A softmax, the operations between it and the product with the values, and that product."""

    softmax: Node
    form: SoftmaxForm
    after: Sequence[Node]
    last: Node
    result: Node
    """The product with the values, or a reshape of it."""


def read(program: Program, around: Surroundings, path: Sequence[Node]) -> Attention:
    """The attention that one of the ways from a product to the softmax leads to."""
    values = _product_with_values(program, around)
    product, query, key = _roles(program, around, path, values)
    scores = ScoreReader(program, product, product_layout(product, query, key))
    for above, node in zip(path, path[1:]):
        scores.read(node, above)
    if around.form.dtype is not None:
        scores.cast(around.form.dtype)
    if around.form.scale != 1:
        scores.scale(around.form.scale)
    probabilities = ProbabilityReader(program, around.softmax, scores.type.layout)
    for node in around.after:
        probabilities.read(node)
    covered = dict.fromkeys(
        [around.result, around.last, *path, *scores.covered, *around.form.nodes, around.softmax, *around.after]
    )
    return Attention(
        around.softmax,
        product,
        query,
        key,
        values,
        around.result,
        tuple(scores.terms),
        tuple(probabilities.terms),
        scores.type,
        probabilities.type,
        tuple(covered),
    )


def _product_with_values(program: Program, around: Surroundings) -> Contraction:
    values = contraction_of(program, around.last)
    assert values is not None
    probabilities = around.after[-1] if around.after else around.softmax
    values = values.swapped() if values.right is probabilities else values
    if values.right is probabilities:
        raise Refused("probabilities times themselves")
    return values


def reshaped_product(program: Program, product: Node, probabilities: Node) -> Node:
    """After autograd, the reshape that restores the batch axes of the product with the values; else the product.

    The result of the kernel has the restored axes, and need not be given those of the product first.
    """
    contraction = contraction_of(program, product)
    assert contraction is not None
    is_sum = contraction.added is not None or contraction.alpha != 1
    if not is_decomposed(program) or contraction.left is not probabilities or is_sum or len(product.users) != 1:
        return product
    (user,) = product.users
    call = program.call(user)
    return user if call is not None and call.op == "reshape" else product


def _roles(
    program: Program, around: Surroundings, path: Sequence[Node], values: Contraction
) -> tuple[Contraction, str | None, str]:
    """The product with queries left and keys right, and the labels of their axes: those for which the softmax is over
    the keys, and the values are summed over them."""
    refusals: list[Refused] = []
    for product, query, key in _possible_roles(program, path[0]):
        layout = product_layout(product, query, key)
        try:
            if _behind_views(program, layout, path).key == around.form.dim:
                _check_values(values, _behind_views(program, layout, [*path, around.softmax, *around.after]))
                return product, query, key
            refusals.append(Refused("the softmax is not over the keys"))
        except Refused as refused:
            refusals.append(refused)
    raise refusals[0] if refusals else Refused("the scores are not a product of queries and keys", at=path[0])


def _possible_roles(program: Program, node: Node) -> Iterator[tuple[Contraction, str | None, str]]:
    product = contraction_of(program, node)
    assert product is not None
    sizes: dict[str, Any] = dict(zip(product.result_axes, shape_of(node)))
    for oriented in (product, product.swapped()):
        if len(oriented.summed) != 1:
            continue
        for key in reversed(oriented.only_right):
            own = oriented.only_left
            # of several axes that keys do not have, the longest is the queries': keys are broadcast along the rest
            queries = sorted(reversed(own), key=lambda a: -size_hint(sizes[a])) if own else [None]
            yield oriented, queries[0], key


def _behind_views(program: Program, layout: Layout, nodes: Sequence[Node]) -> Layout:
    for before, node in zip(nodes, nodes[1:]):
        call = program.call(node)
        if call is not None and call.op in VIEWS:
            layout, _ = viewed(program, layout, before, node)
    return layout


def _check_values(values: Contraction, layout: Layout) -> None:
    if not is_plain_number(values.alpha) or not is_plain_number(values.beta):
        raise Refused("a product times something that is not a number")
    if len(values.summed) != 1 or len(values.only_right) != 1:
        raise Refused("the values are not multiplied as in attention")
    if values.left_axes[layout.key] != values.summed[0]:
        raise Refused("the values are not summed over the keys")
    if BROADCAST in values.left_axes or set(values.left_axes) - set(values.result_axes) != set(values.summed):
        raise Refused("the probabilities are stretched")
