"""A product whose result is reduced and scattered, as one operator of symmetric memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.collectives import REDUCE_SCATTER, Collective
from ..ir.facts import difference, fact, is_static, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import Edit, Erase, ReadInstead, Together
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .arrangement import Arrangement, is_reshape, rows, scattered
from .gather_matmul import contiguous_as
from .products import Product, product
from .symmetric_memory import LAST_DIM, fused_operator, problem_of_group

PLAIN, SCALED = "fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter"
REDUCTIONS = ("sum", "avg")


@dataclass(frozen=True)
class MatmulScatter:
    """A product and a reduce-scatter that become one call."""

    collective: Collective
    product: Product
    shape: tuple[int, ...]
    """The shape that the product has as the tensor that is scattered."""
    dim: int
    inner: tuple[Node, ...]
    """The nodes from the collective to the product, users before their operands."""


def matmul_scatter(program: Program, collective: Collective) -> MatmulScatter | Refusal | None:
    """The plan for a reduce-scatter; None if it does not scatter a product; a refusal if it cannot be fused."""
    operand = tensor_fact(collective.operands[0])
    if collective.kind != REDUCE_SCATTER or collective.is_coalesced or operand is None or not is_static(operand.shape):
        return None
    source = _product_behind(program, collective.operands[0])
    if source is None or collective.ranks is None:
        return None
    name = SCALED if source.is_scaled else PLAIN
    if (problem := problem_of_group(collective, name)) is not None:
        return problem
    if collective.reduction not in REDUCTIONS:
        return Refusal("the operator reduces only by {wanted}", wanted="sum or avg", found=collective.reduction)
    if collective.wait is None:
        return Refusal("the result of {at} has other uses than one wait", at=collective.node)
    if source.bias is not None and not source.is_scaled:
        return Refusal("a bias is added to {at} before it is reduced", at=source.node)
    arrangement = scattered(program, collective.operands[0], collective.ranks)
    if arrangement is None:
        return Refusal("{at} is used elsewhere, or scattered in another arrangement", at=source.node)
    return _plan(program, collective, source, arrangement)


def _product_behind(program: Program, node: Node) -> Product | None:
    """The product that a reduce-scatter's operand comes from, looking through operations that only rearrange it."""
    for _ in range(8):
        source = product(program, node)
        if source is not None or not node.all_input_nodes:
            return source
        call = program.call(node)
        rearranges = is_reshape(program, node) or (
            call is not None and call.op in ("cat", "getitem", "split", "split_with_sizes", "permute", "clone")
        )
        if not rearranges:
            return None
        node = node.all_input_nodes[0]
    return None


def _plan(
    program: Program, collective: Collective, source: Product, arrangement: Arrangement
) -> MatmulScatter | Refusal:
    ranks = collective.ranks or 1
    inner, node = list(arrangement.inner), arrangement.value
    while node is not source.node:
        if not is_reshape(program, node) or len(node.users) != 1:
            return Refusal("{at} is used elsewhere, or scattered in another arrangement", at=source.node)
        inner.append(node)
        node = node.all_input_nodes[0]
    if len(source.node.users) != 1:
        return Refusal("{at} is used elsewhere", at=source.node)
    count, columns = tensor_of(source.node).shape
    shape, dim = arrangement.shape, arrangement.dim
    if dim == 0:
        shape = (count, columns)
    elif len(shape) > 1 and dim == len(shape) - 2 and shape[-1] * ranks == columns and shape[dim] == ranks:
        shape, dim = (*shape[:dim], columns), dim  # columns, one part after the other
    if shape[-1] != columns or rows(shape) != count:
        return Refusal("the scattered parts are not rows or columns of the product", at=source.node)
    if shape[dim] % ranks:
        return Refusal("the parts of the ranks differ in size", at=source.node, wanted=ranks, found=shape[dim])
    is_last = dim == len(shape) - 1
    if is_last and source.is_scaled:
        return Refusal("a scaled product is not computed along the last dim", at=source.node)
    if is_last and shape[-1] // ranks < LAST_DIM:
        return Refusal(
            "along the last dim each rank gets too few columns", at=source.node, wanted=LAST_DIM,
            found=shape[-1] // ranks,
        )  # fmt: skip
    if source.is_scaled and (problem := _problem_of_scales(source, count, shape, dim)) is not None:
        return problem
    if writer := program.aliasing.written_between([source.left, *source.others], source.node, collective.node):
        return Refusal("{at} writes an operand before the result is scattered", at=writer)
    return MatmulScatter(collective, source, shape, dim, tuple(inner))


def _problem_of_scales(source: Product, count: int, shape: tuple[int, ...], dim: int) -> Refusal | None:
    assert source.left_scale is not None
    scale = tensor_fact(source.left_scale)
    if scale is None or scale.dtype != torch.float32 or (scale.numel() > 1 and scale.shape != (count, 1)):
        return Refusal("the scales are not float32, one for all rows or one per row", at=source.left_scale)
    if dim > 1:  # the operator reads the dims of its result as if the scattered one were the second
        return Refusal("a scaled product is scattered along the first two dims only", at=source.node, found=dim)
    return None


def emit(op: Emitter, program: Program, plan: MatmulScatter) -> Edit:
    """Emit the call where the collective starts, and return the edit that replaces the nodes whose work it does."""
    collective, source = plan.collective, plan.product
    wait = collective.wait
    assert wait is not None  # `matmul_scatter` has checked
    early = op.at(collective.node)
    lead = plan.shape[:-1]
    left = early.program.value(source.left)
    if len(lead) > 1:
        left = early.reshape(left, [*lead, tensor_of(source.left).shape[1]])
    if source.is_scaled:
        assert source.left_scale is not None
        scale = early.program.value(source.left_scale)
        if tensor_of(source.left_scale).numel() > 1 and len(lead) > 1:
            scale = early.reshape(scale, [*lead, 1])
        result = early.call(
            fused_operator(SCALED), left, source.right, scale, source.right_scale, collective.reduction, plan.dim,
            plan.dim, collective.group, list(plan.shape), source.bias, source.result_scale, source.dtype, source.fast,
        )  # fmt: skip
    else:
        result = early.call(
            fused_operator(PLAIN), left, source.right, collective.reduction, plan.dim, collective.group
        )
    value = contiguous_as(early, result.node, tensor_of(wait).shape)
    if problem := difference(fact(wait), fact(value.node)):
        raise Refused(problem.blaming(wait))
    spent = [wait, collective.node, *plan.inner, source.node]
    return Together([ReadInstead(wait, value.node, tuple(wait.users)), Erase(spent)])
