"""Queries, keys, values and masks brought into the order (batch, heads, rows, columns)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import known, known_equal, numel, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .layout import BatchStep, padded

ONE_QUERY = "0"
"""The label of the query axis where there is a single query, which has no axis."""


WIDENED = 4
"""How many times as wide an operand may become when it is padded to the width of the others."""


def shape_of(node: Node) -> list[Any]:
    tensor = tensor_fact(node)
    if tensor is None:
        raise Refused("shapes are not known")
    return list(tensor.shape)


def arranged(
    op: Emitter, program: Program, node: Node, axes: Sequence[str], wanted: Sequence[str], sizes: dict[str, Any]
) -> Value:
    """An operand with its axes in the wanted order; missing axes are added and expanded to their size."""
    node, axes = without_permutes(program, node, axes)
    value = Value(program, node)
    idle = [a for a in axes if a not in wanted]
    if any(not known(s == 1) for s, a in zip(value.shape, axes) if a in idle):
        raise Refused("an operand has axes that attention has no place for")
    if idle:
        value = op.reshape(value, [s for s, a in zip(value.shape, axes) if a not in idle])
        axes = [a for a in axes if a not in idle]
    present = [a for a in wanted if a in axes]
    order = [list(axes).index(a) for a in present]
    if order != sorted(order):
        value = op.permute(value, order)
    if len(present) == len(wanted):
        return value
    for place, axis in enumerate(wanted):
        if axis not in present:
            value = op.unsqueeze(value, place)
    of = dict(zip(wanted, value.shape))
    full = [of[a] if a in present else sizes[a] for a in wanted]
    return value if known_equal(full, value.shape) else op.expand(value, full)


def without_permutes(program: Program, node: Node, axes: Sequence[str]) -> tuple[Node, list[str]]:
    """The value that an operand is a permute of, and its axes there."""
    axes = list(axes)
    while (call := program.call(node)) is not None and call.op == "permute" and not call.mutates:
        before: list[str] = [""] * len(axes)
        for axis, dim in zip(axes, call.args["dims"]):
            before[dim] = axis
        node, axes = call.args["self"], before
    return node, axes


def apply_step(op: Emitter, value: Value, step: BatchStep) -> Value:
    rank = value.rank
    if step.order is not None:
        return op.permute(value, [*step.order, rank - 2, rank - 1])
    assert step.sizes is not None
    return op.reshape(value, [*step.sizes, *value.shape[-2:]])


def four_axes(op: Emitter, value: Value, batch: Sequence[Any], broadcast: bool = False) -> Value:
    """The value with the axes (batch, heads, rows, columns); `broadcast`: a mask, whose axes may have size one."""
    rank = len(batch)
    value = padded(op, value, rank + 2)
    own = list(value.shape)
    if rank == 2:
        return value
    if rank < 2:
        return op.reshape(value, [*[1] * (2 - rank), *own])
    lead, rest = own[: rank - 1], own[rank - 1 :]
    if broadcast and not all(known(s == 1) for s in lead) and not known_equal(lead, batch[:-1]):
        value = op.expand(value, [*batch[:-1], *rest])
        lead = list(batch[:-1])
    return op.reshape(value, [numel(lead), *rest])


def lies_across(operand: torch.Tensor, columns: Any, device: str = "cuda") -> bool:
    """Is this an operand or a mask that GPU kernels cannot read, because its last dim is broadcast or has a stride
    other than 1?

    With it torch would fall back to plain products, or choose a kernel that refuses it at run time.
    """
    if operand.device.type != device or operand.dim() == 0 or operand.dtype == torch.float64:
        return False
    one_for_all = known(operand.shape[-1] == 1) and not known(columns == 1)
    return one_for_all or known(operand.stride(-1) != 1)


def laid_out(op: Emitter, value: Value, columns: Any, device: str = "cuda") -> Value:
    """An operand or a mask unchanged, or a contiguous copy if the kernels could not read it."""
    if value.tensor is None or not lies_across(value.tensor, columns, device):
        return value
    if not known_equal(value.shape[-1], columns):
        value = op.expand(value, [*value.shape[:-1], columns])
    return op.clone(value, memory_format=torch.contiguous_format)


def for_kernel(op: Emitter, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
    """Queries, keys and values as the kernels of their device need them: with a last stride of 1, and on a CPU padded
    to the same width.

    Zeros appended to queries and keys change no product; those appended to the values are cut off from the result.
    """
    if q.device.type != "cpu":
        q, k, v = (laid_out(op, x, x.shape[-1]) for x in (q, k, v))
        return q, k, v
    q, k, v = (_along_rows(op, x) for x in (q, k, v))
    own, width = q.shape[-1], v.shape[-1]
    if not isinstance(own, int) or not isinstance(width, int) or own == width:
        return q, k, v
    if max(own, width) > WIDENED * min(own, width):
        return q, k, v
    if own > width:
        return q, k, op.constant_pad_nd(v, [0, own - width], 0.0)
    return op.constant_pad_nd(q, [0, width - own], 0.0), op.constant_pad_nd(k, [0, width - own], 0.0), v


def _along_rows(op: Emitter, value: Value) -> Value:
    """A contiguous copy if the last stride is not 1. Values of symbolic sizes are not copied: the strides of the result
    might not be provable afterwards."""
    across = value.tensor is not None and known(value.tensor.stride(-1) != 1)
    across = across and all(isinstance(s, int) for s in value.shape)
    return op.clone(value, memory_format=torch.contiguous_format) if across else value
