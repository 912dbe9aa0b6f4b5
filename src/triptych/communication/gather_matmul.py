"""An all-gather and the products that read its result, as one operator of symmetric memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..ir.collectives import ALL_GATHER, Collective, awaited
from ..ir.facts import difference, fact, is_static, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..rewrite.edits import Edit, Erase, Move, ReadInstead, Together
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .arrangement import Arrangement, gathered, is_reshape, rows
from .products import Product, Readers, moved_before, product, readers
from .symmetric_memory import LAST_DIM, fused_operator, problem_of_group

aten = torch.ops.aten

PLAIN, SCALED = "fused_all_gather_matmul", "fused_all_gather_scaled_matmul"


@dataclass(frozen=True)
class RowScales:
    """Row scales of a gathered tensor that are gathered themselves: the operator can gather both at once."""

    collective: Collective
    arrangement: Arrangement
    views: tuple[Node, ...]
    """Views of the gathered scales."""
    users: frozenset[Node]
    """The nodes that read the gathered scales."""


@dataclass(frozen=True)
class GatherMatmul:
    """An all-gather and products that become one call."""

    collective: Collective
    arrangement: Arrangement
    """How the result is arranged, with the part of one rank as a tensor of two dims or more."""
    readers: Readers
    products: tuple[Product, ...]
    """The products that the call computes."""
    moved: tuple[Node, ...]
    """The nodes to move before the call, in this order."""
    scales: RowScales | None
    """If rows are scaled and each rank has the scales of its own rows: these scales."""

    @property
    def anchor(self) -> Node:
        """The first reader of the gathered tensor; the call goes before it."""
        return min(self.arrangement.value.users)

    @property
    def is_scaled(self) -> bool:
        return self.products[0].is_scaled

    @property
    def returns_gathered(self) -> bool:
        """Does anybody else read the gathered tensor?"""
        fused = {product.node for product in self.products}
        return bool(self.readers.others) or any(p.node not in fused for p in self.readers.products)


def gather_matmul(program: Program, collective: Collective) -> GatherMatmul | Refusal | None:
    """The plan for an all-gather; None if no product reads its result; a refusal if it cannot be fused."""
    wait, shard = collective.wait, collective.operands[0]
    tensor, result = tensor_fact(shard), tensor_fact(collective.node)
    if collective.kind != ALL_GATHER or collective.is_coalesced or tensor is None or result is None:
        return None
    if wait is None or collective.ranks is None or not is_static((*tensor.shape, *result.shape)):
        return None if wait is not None else _not_waited_once(program, collective)
    arrangement = gathered(program, wait, shard, collective.ranks)
    last = len(arrangement.shape) - 1
    width = arrangement.shape[-1] * (collective.ranks if arrangement.dim == last else 1) if arrangement.dim else None
    reading = readers(program, arrangement.value, width)
    if not reading.products:
        return None
    if arrangement.dim == 0:  # whatever the leading dims are, the rows of one rank are contiguous
        width = int(tensor_of(reading.products[0].left).shape[1])
        if tensor.numel() % width:
            return Refusal("a rank does not have whole rows of the product's operand", at=shard)
        arrangement = replace(arrangement, shape=(tensor.numel() // width, width))
    return _plan(program, collective, arrangement, reading)


def _not_waited_once(program: Program, collective: Collective) -> Refusal | None:
    users = [user for wait in collective.waits for user in wait.users]
    if any(product(program, user) is not None for user in users):
        return Refusal("the result of {at} has other uses than one wait", at=collective.node)
    return None


def _plan(
    program: Program, collective: Collective, arrangement: Arrangement, reading: Readers
) -> GatherMatmul | Refusal:
    first = reading.products[0]
    name = SCALED if first.is_scaled else PLAIN
    if (problem := problem_of_group(collective, name)) is not None:
        return problem
    is_last = arrangement.dim == len(arrangement.shape) - 1
    scales: RowScales | None = None
    if first.is_scaled:
        if is_last:
            return Refusal("a scaled product is not computed along the last dim", at=first.node)
        if isinstance(kind := _scales(program, collective, arrangement, first), Refusal):
            return kind
        scales = kind
    if writer := program.aliasing.first_writer(arrangement.value):
        return Refusal("{at} writes the gathered tensor", at=writer)
    anchor = min(arrangement.value.users)
    behind = {*reading.views, *reading.others, *(p.node for p in reading.products)}
    fused: list[Product] = []
    moved: list[Node] = []
    problem = None
    for candidate in reading.products:
        if candidate.is_scaled != first.is_scaled or candidate.left_scale is not first.left_scale:
            continue
        operands = candidate.others
        if scales is not None:
            operands = [*(o for o in operands if o is not first.left_scale), scales.collective.operands[0]]
        needed = moved_before(program, operands, anchor, behind)
        if writer := program.aliasing.written_between(operands, anchor, candidate.node):
            needed = Refusal("{at} writes an operand of {found} before it is computed", at=writer, found=candidate.node)
        if isinstance(needed, Refusal):
            problem = needed
            continue
        fused.append(candidate)
        moved += [node for node in needed if node not in moved]
    if not fused:
        return problem or Refusal("no product can be computed where the gathered tensor is first read", at=first.node)
    if scales is not None and not scales.users <= {candidate.node for candidate in fused}:
        return Refusal("the gathered scales are used elsewhere", at=scales.arrangement.value)
    read = [collective.operands[0], *(scales.collective.operands if scales is not None else ())]
    started = min(collective.node, *(() if scales is None else (scales.collective.node,)), anchor)
    if writer := program.aliasing.written_between(read, started, anchor):
        return Refusal("{at} writes a gathered operand before the product", at=writer)
    plan = GatherMatmul(collective, arrangement, reading, tuple(fused), tuple(sorted(moved)), scales)
    if is_last and arrangement.shape[-1] < LAST_DIM:
        return Refusal(
            "along the last dim each rank has too few columns", at=collective.node, wanted=LAST_DIM,
            found=arrangement.shape[-1],
        )  # fmt: skip
    if is_last and plan.returns_gathered:
        return Refusal("{at} is gathered along the last dim and used elsewhere", at=arrangement.value)
    return plan


def _scales(
    program: Program, collective: Collective, arrangement: Arrangement, scaled: Product
) -> RowScales | Refusal | None:
    """The row scales, if each rank has those of its own rows; None if there is one scale, or those of all rows."""
    assert scaled.left_scale is not None
    scale = tensor_fact(scaled.left_scale)
    count = rows(tuple(tensor_of(scaled.left).shape))
    if scale is None or scale.dtype != torch.float32:
        return Refusal("the scales are not float32, one for all rows or one per row", at=scaled.left_scale)
    if scale.numel() == 1:
        # if a rank has one row, the operator takes a single scale for the scale of that row
        if rows(arrangement.shape) == 1:
            return Refusal(
                "a rank has one row, and a single scale would be taken for the scale of that row", at=scaled.left_scale
            )
        return None
    if scale.shape != (count, 1):
        return Refusal(
            "the scales are not float32, one for all rows or one per row",
            at=scaled.left_scale,
            wanted=(count, 1),
            found=tuple(scale.shape),
        )
    node = scaled.left_scale
    while is_reshape(program, node):
        node = program.call(node).args["self"]  # type: ignore[union-attr]
    wait = node
    for _ in range(4):  # through a split, its parts and a concatenation, or a view, a permutation and a copy
        if wait.op != "call_function" or awaited(wait) is not None or not wait.all_input_nodes:
            break
        wait = wait.all_input_nodes[0]
    source = awaited(wait)
    if source is None or source.kind != ALL_GATHER or source.group != collective.group or source.wait is None:
        return None
    scale_arrangement = gathered(program, wait, source.operands[0], collective.ranks or 1)
    row_shape = (*arrangement.shape[:-1], 1)
    shape = scale_arrangement.shape if scale_arrangement.dim else row_shape
    same = (
        scale_arrangement.value is node
        and scale_arrangement.dim == arrangement.dim
        and rows((*shape, 1)) == rows(arrangement.shape)
    )
    if not same or (scale_arrangement.dim and shape[: len(row_shape) - 1] != row_shape[:-1]):
        return None
    views = [node]
    for view in views:
        views += [user for user in view.users if is_reshape(program, user)]
    users = frozenset(user for view in views for user in view.users if user not in views)
    return RowScales(source, scale_arrangement, tuple(views[1:]), users)


def emit(op: Emitter, program: Program, plan: GatherMatmul) -> Edit:
    """Emit the call, and return the edit that replaces the nodes whose work it does."""
    early, collective, arrangement = op.at(plan.anchor), plan.collective, plan.arrangement
    left = tensor_of(plan.products[0].left)
    shard = contiguous_as(early, collective.operands[0], arrangement.shape, left.dtype)
    rights = [fused.right for fused in plan.products]
    if plan.is_scaled:
        call = early.call(
            fused_operator(SCALED), shard, rights, _scale_operand(early, plan), [p.right_scale for p in plan.products],
            arrangement.dim, collective.group, [p.bias for p in plan.products],
            [p.result_scale for p in plan.products], [p.dtype for p in plan.products], [p.fast for p in plan.products],
        )  # fmt: skip
    else:
        call = early.call(
            fused_operator(PLAIN), shard, rights, arrangement.dim, collective.group, return_A=plan.returns_gathered
        )
    results = early.call(operator.getitem, call, 1)
    replaced: list[tuple[Node, Value]] = []
    for i, fused in enumerate(plan.products):
        value = contiguous_as(early, early.call(operator.getitem, results, i).node, tensor_of(fused.node).shape)
        if fused.bias is not None and not fused.is_scaled:
            value = early.add(value, fused.bias)
        replaced.append((fused.node, value))
    if plan.returns_gathered:
        whole, was = early.call(operator.getitem, call, 0).node, tensor_of(arrangement.value)
        replaced.append((arrangement.value, contiguous_as(early, whole, was.shape, was.dtype)))
    for node, value in replaced:
        if problem := difference(fact(node), fact(value.node)):
            raise Refused(problem.blaming(node))
    # operands first, then what was emitted for them
    moves = [Move(node, plan.anchor) for node in (*plan.moved, *early.made)] if plan.moved else []
    return Together([
        *moves,
        *(ReadInstead(node, value.node, tuple(node.users)) for node, value in replaced),
        Erase(_spent(plan)),
    ])  # fmt: skip


def _scale_operand(early: Emitter, plan: GatherMatmul) -> Node | Value:
    scale, arrangement = plan.products[0].left_scale, plan.arrangement
    assert scale is not None
    if plan.scales is not None:
        return contiguous_as(early, plan.scales.collective.operands[0], (*arrangement.shape[:-1], 1))
    if tensor_of(scale).numel() == 1:
        return scale
    whole = list(arrangement.shape[:-1])
    whole[arrangement.dim] *= plan.collective.ranks or 1
    return contiguous_as(early, scale, (*whole, 1))


def _spent(plan: GatherMatmul) -> list[Node]:
    """The nodes that are no longer needed, users before their operands."""
    erased = dict.fromkeys(fused.node for fused in plan.products)
    chains = [(plan.readers.views, plan.arrangement, plan.collective)]
    if plan.scales is not None:
        chains.append((plan.scales.views, plan.scales.arrangement, plan.scales.collective))
    for views, arrangement, collective in chains:
        for view in reversed(views):
            if all(user in erased for user in view.users):
                erased[view] = None
        nodes = (arrangement.value, *reversed(arrangement.inner), collective.wait, collective.node)
        erased |= dict.fromkeys(node for node in nodes if node is not None)
    return list(erased)


def contiguous_as(op: Emitter, node: Node, shape: Sequence[int], dtype: torch.dtype | None = None) -> Value:
    """The value as a contiguous tensor of this shape; with a dtype, its bytes are read as that dtype."""
    value = op.program.value(node)
    if dtype is not None and tensor_of(node).dtype != dtype:
        value = op.call(aten.view.dtype, value, dtype)
    if not tensor_of(value.node).is_contiguous():
        value = op.clone(value, memory_format=torch.contiguous_format)
    if tuple(tensor_of(value.node).shape) != tuple(shape):
        value = op.reshape(value, list(shape))
    return value
