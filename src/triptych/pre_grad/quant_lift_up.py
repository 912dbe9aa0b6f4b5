"""quant_lift_up: moves quantize and dequantize past views, next to the GEMM that they belong to.

    linear -> view -> permute -> quantize          linear -> quantize -> view -> permute
    dequantize -> permute -> matmul                permute -> dequantize -> matmul

A code generator has one kernel for `dequantize, GEMM, quantize`; and views of int8 move a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import _private
from ..ir.calls import Call
from ..ir.facts import known
from ..ir.program import Value
from ..ir.reshape import reshape_groups
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

_private.quantized_operators  # noqa: B018  (this access registers the operators)
ops = torch.ops.quantized_decomposed
i8 = torch.int8

PER_TENSOR, PER_CHANNEL = "_per_tensor", "_per_channel"
QUANTIZE = tuple(f"quantized_decomposed.quantize{how}" for how in (PER_TENSOR, PER_CHANNEL))
DEQUANTIZE = tuple(f"quantized_decomposed.dequantize{how}" for how in (PER_TENSOR, PER_CHANNEL))

AXIS = 3
"""The position of the channel axis among the arguments."""

SAME_ELEMENTS = ("reshape", "permute", "squeeze", "unsqueeze")
FEWER_ELEMENTS = ("slice", "select")


class LiftQuantize(Rule):
    """quantize(view(x), scale) -> view(quantize(x, scale)), per tensor or per channel"""

    mixed_dtypes = True

    def pattern(self, op, v: Tensor, scale, zero_point, axis, low, high, dtype):
        quantize = [getattr(op, name) for name in QUANTIZE]
        return quantize[0](v, scale, zero_point, low, high, dtype) | quantize[1](
            v, scale, zero_point, axis, low, high, dtype
        )

    def check(self, m, v):
        view = v.call
        m.applies(
            view is not None and view.op in (*SAME_ELEMENTS, *FEWER_ELEMENTS, "expand"),
            "the quantized value is not a view",
        )
        is_all = view.op in SAME_ELEMENTS or view.op == "expand"
        m.require(is_all, "{found} leaves fewer elements to quantize", at=v, found=view.op)
        m.require_no_other_user(v)
        _axis_before(m, v)
        m.cover([v.node])

    def rewrite(self, op, m, v):
        x = v.call.args["self"]
        return op.again(v.node, {x: _requantize(op, m.root, v, x, _axis_before(m, v)).node})

    examples = [
        fires(lambda x: ops.quantize_per_tensor(x.view(2, -1), 0.1, 3, -128, 127, i8), "f32[4, 8]"),
        fires(lambda x: ops.quantize_per_tensor.default(x.view(2, 2, 8).transpose(1, -1), 0.1, 0, -128, 127, i8),
              "f32[4, 8]"),
        fires(lambda x, w: ops.quantize_per_tensor((x @ w).permute(1, 0), 0.1, 3, -128, 127, i8),
              "f32[4, 8]", "f32[8, 2]"),
        fires(lambda x: ops.quantize_per_tensor(x[:, None].squeeze(1), 0.1, 3, 0, 255, torch.uint8), "f32[4, 8]"),
        fires(lambda x, s, z: ops.quantize_per_tensor.tensor(x.t(), s, z, -128, 127, i8),
              "f32[4, 8]", torch.tensor(0.1), torch.tensor(3)),
        fires(lambda x: ops.quantize_per_tensor(x.transpose(0, 1), 0.1, 3, -128, 127, i8), "f32[4, 8]", dynamic=True),
        fires(lambda x, s, z: ops.quantize_per_channel(x.t(), s, z, 0, -128, 127, i8),
              "f32[4, 2]", torch.tensor([0.1, 0.2]), torch.tensor([1, 2])),
        fires(lambda x, s, z: ops.quantize_per_channel(x.view(4, 3, 2), s, z, 0, -128, 127, i8),
              "f32[4, 6]", torch.linspace(0.1, 0.9, 4), torch.tensor([1, 2, 3, 4])),
        fires(lambda x, s, z: ops.quantize_per_channel(x.view(4, 1, 6).unsqueeze(0), s, z, 3, -128, 127, i8),
              "f32[4, 6]", torch.linspace(0.1, 0.9, 6), torch.zeros(6, dtype=torch.int64)),
        declines(lambda x, s, z: ops.quantize_per_channel(x.view(2, 3, 4), s, z, 1, -128, 127, i8),
                 "f32[4, 6]", torch.linspace(0.1, 0.9, 3), torch.tensor([1, 2, 3]), because="no dim"),
        declines(lambda x: ops.quantize_per_tensor(x[1:], 0.1, 3, -128, 127, i8), "f32[4, 8]",
                 because="leaves fewer elements"),
        declines(lambda x: (y := x.t(), ops.quantize_per_tensor(y, 0.1, 3, -128, 127, i8)), "f32[4, 8]",
                 because="used elsewhere"),
        declines(lambda x: ops.quantize_per_tensor(x.expand(4, 8), 0.1, 3, -128, 127, i8), "f32[8]", because="stride"),
        declines(lambda x: ops.quantize_per_tensor(x.relu(), 0.1, 3, -128, 127, i8), "f32[4, 8]"),
        declines(lambda x: _write_before_quantize(x), "f32[4, 8]", dialects=["torch"], because="in between"),
    ]  # fmt: skip


class SinkDequantize(Rule):
    """view(dequantize(q, scale)) -> dequantize(view(q), scale), per tensor or per channel"""

    mixed_dtypes = True

    def pattern(self, op, d: Tensor, shape, dims, dim, start, end, step, index):
        return op.any_of(
            op.reshape(d, shape), op.permute(d, dims), op.squeeze(d, dim), op.unsqueeze(d, dim),
            op.slice(d, dim, start, end, step), op.select(d, dim, index),
        )  # fmt: skip

    def check(self, m, d):
        call = d.call
        m.applies(call is not None and call.op in DEQUANTIZE, "it is not a view of a dequantized value")
        m.require_no_other_user(d)
        _axis_after(m, d)
        m.cover([d.node])

    def rewrite(self, op, m, d):
        q = d.call.args["input"]
        view = op.again(m.root.node, {d.node: q})
        return _requantize(op, d, Value(m.program, q), view.node, _axis_after(m, d))

    examples = [
        fires(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8).view(2, -1) + 1, "i8[4, 8]"),
        fires(lambda q, x: x @ ops.dequantize_per_tensor.default(q, 0.1, 3, -128, 127, i8).t(),
              "i8[4, 8]", "f32[2, 8]"),
        fires(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8)[1:3] + 1, "i8[4, 8]"),
        fires(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8, out_dtype=torch.float16).mT.unsqueeze(0),
              "i8[4, 8]"),
        fires(lambda q, s, z: ops.dequantize_per_tensor.tensor(q, s, z, -128, 127, i8).t() + 1,
              "i8[4, 8]", torch.tensor(0.1), torch.tensor(3)),
        fires(lambda q, s, z: ops.dequantize_per_channel(q, s, z, 0, -128, 127, i8).permute(1, 0) + 1,
              "i8[2, 8]", torch.linspace(0.1, 0.9, 2), torch.tensor([1, 2])),
        fires(lambda q, s: ops.dequantize_per_channel(q, s, None, 1, -128, 127, i8).select(0, 1) + 1,
              "i8[4, 2]", torch.linspace(0.1, 0.9, 2)),
        fires(lambda q, s, z, x: ops.dequantize_per_channel(q, s, z, axis=0, quant_min=-128, quant_max=127, dtype=i8)
              .narrow(1, 2, 3) @ x, "i8[2, 8]", torch.linspace(0.1, 0.9, 2), torch.tensor([1, 2]), torch.ones(3, 4)),
        fires(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8).t() + 1, "i8[4, 8]", dynamic=True),
        declines(lambda q, s, z: ops.dequantize_per_channel(q, s, z, 0, -128, 127, i8)[1:] + 1,
                 "i8[2, 8]", torch.linspace(0.1, 0.9, 2), torch.tensor([1, 2]), because="no dim"),
        fires(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8)[:, 1:] + 1, "i8[4, 8]"),
        declines(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8)[:, 1:], "i8[4, 8]", because="stride"),
        declines(lambda q: (d := ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8), d.t() + 1), "i8[4, 8]",
                 because="used elsewhere"),
        declines(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8).expand(4, 8) + 1, "i8[8]"),
        declines(lambda q: ops.dequantize_per_tensor(q, 0.1, 3, -128, 127, i8).t().add_(1), "i8[4, 8]",
                 dialects=["torch"], because="written"),
        declines(lambda x: x.t() + 1, "f32[4, 8]"),
    ]  # fmt: skip


def _write_before_quantize(x: Any) -> Any:
    """For examples: y is a view of x, so the value that is quantized includes the write."""
    y = x.t()
    x.add_(1)
    return ops.quantize_per_tensor(y, 0.1, 3, -128, 127, i8)


def _requantize(op: Emitter, node: Value, was: Value, now: Any, axis: int | None) -> Value:
    """The same quantize or dequantize, of another value and, by channel, along another dim."""
    if axis is None:
        return op.again(node.node, {was.node: now})
    call = node.node
    args, kwargs = torch.fx.map_arg((call.args, call.kwargs), lambda n: now if n is was.node else n)
    if "axis" in kwargs:
        return op.node(call.op, call.target, args, {**kwargs, "axis": axis})
    return op.node(call.op, call.target, (*args[:AXIS], axis, *args[AXIS + 1 :]), kwargs)


def _axis_before(m: Match, v: Value) -> int | None:
    """The channel axis in the operand of the view v; None if the quantization is not by channel."""
    call, view = m.root.call, v.call
    if call is None or view is None or not call.op.endswith(PER_CHANNEL):
        return None
    before = {after: dim for dim, after in _kept_dims(view, Value(m.program, view.args["self"]), v).items()}
    axis = call.args["axis"] % v.rank
    m.require(axis in before, "no dim before the view is the channel axis", at=v, wanted=f"dim {axis}")
    return before[axis]


def _axis_after(m: Match, d: Value) -> int | None:
    call, view = d.call, m.root.call
    if call is None or view is None or not call.op.endswith(PER_CHANNEL):
        return None
    whole_dims = _kept_dims(view, d, m.root)
    axis = call.args["axis"] % d.rank
    m.require(axis in whole_dims, "no dim after the view is the channel axis", wanted=f"dim {axis}")
    return whole_dims[axis]


def _kept_dims(view: Call, source: Value, result: Value) -> dict[int, int]:
    """Dims that a view leaves whole: each dim of its operand with the dim that it is in the result."""
    before, after = source.shape, result.shape
    if view.op == "permute":
        return {dim: i for i, dim in enumerate(view.args["dims"])}
    if view.op == "slice":
        return {dim: dim for dim in range(len(before)) if dim != view.get("dim")}
    if view.op == "select":
        return {dim: dim - (dim > view.args["dim"]) for dim in range(len(before)) if dim != view.args["dim"]}
    whole = {}
    for old, new in reshape_groups(before, after) or ():
        if len(old) + len(new) > 2:
            old, new = [d for d in old if not known(before[d] == 1)], [d for d in new if not known(after[d] == 1)]
        if len(old) == len(new) == 1:
            whole[old[0]] = new[0]
    return whole


RULES: Sequence[Rule] = (LiftQuantize(), SinkDequantize())


@dataclass(frozen=True)
class QuantLiftUp(Pass):
    """Moves quantize before the views that precede it, and dequantize behind the views that follow it, so that both are
    next to their GEMM. The views in between are then views of small integers.

    The pass declines where the channel axis is not a dim of the other side of the view, where slicing before quantize
    leaves fewer elements to quantize, and where the value in between is used elsewhere.
    """

    name: ClassVar[str] = "quant_lift_up"

    def rules(self) -> Sequence[Rule]:
        return RULES
