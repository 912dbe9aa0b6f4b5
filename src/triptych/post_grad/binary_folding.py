"""`binary_folding`: folds arithmetic with constants that follows a product or convolution into its frozen weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.calls import Call, op_parameters
from ..ir.facts import known_equal
from ..ir.program import Program, Value
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires, others_are_weights
from ..rewrite.rule import Match, Rule

WEIGHT = {"matmul": "other", "addmm": "mat2", "convolution": "weight"}
"""Operations that are linear in a weight, with the name of that operand."""
BIAS = {"addmm": "self", "convolution": "bias"}
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


ATEN: dict[str, Any] = {"dialects": ("aten",), "prepare": others_are_weights}
FROZEN: dict[str, Any] = {**ATEN, "options": {"freeze": True}}


class BinaryFolding(Rule):
    """(x @ W + b) * c -> x @ (W * c) + b * c, and + c -> x @ W + (b + c), for frozen W, b, c; also for convolutions

    Up to rounding, for finite factors: the new weights are computed once, in float32 if they are in half precision. If
    a product has no bias, a constant that is added to it does not become one: `addmm` decides whether it should.
    """

    exact = False
    mixed_dtypes = True  # `check` compares the dtypes, once it knows that there is a frozen product

    def pattern(self, op, y: Tensor, c):
        return op.one_of(("add", "sub", "mul", "div"), y, c)

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        return program.options.freeze

    def check(self, m, y, c):
        m.applies(m.program.options.freeze and m.root.known)
        m.applies(m.root.op in ("add", "mul") or m.root.call.args["self"] is y.node, "the product is subtracted")
        linear = _linear(m, y)
        m.applies(linear is not None, "no product or convolution before it")
        call, scales = linear.call, m.root.op in ("mul", "div")
        m.applies(y.is_float and (call.op != "matmul" or scales))
        weights = [n for key in (WEIGHT[call.op], BIAS.get(call.op)) if isinstance(n := call.args.get(key), Node)]
        m.applies(m.program.computed_once(*weights), "its weights are not frozen")
        unscaled = not any(call.get(key) not in (None, 1) for key in ("alpha", "beta") if key in call.args)
        m.require(unscaled, "the product is scaled by alpha or beta")
        m.require(
            not call.args.get("transposed"),
            "a transposed convolution has its output channels in another dim of the weight",
        )
        m.require(m.root.dtype == y.dtype, "{found} becomes {wanted}", wanted=m.root.dtype, found=y.dtype)
        if isinstance(c, Value):
            m.require(m.program.computed_once(c.node), "{at} is not frozen", at=c)
            m.require(c.device == y.device, "the operands are on different devices", at=c)
            m.require(m.root.op != "div", "a divisor may be 0", at=c)
            m.require(c.dtype == y.dtype, "different dtypes {wanted} and {found}", at=c, wanted=y.dtype, found=c.dtype)
            m.require(_channels(linear, y, c) is not None, "{at} is not one number per channel", at=c)
        else:
            m.require(isinstance(c, (int, float)) and not isinstance(c, bool), "the constant is not a known number")
            m.require(m.root.op != "div" or c != 0, "it divides by 0")
            m.require(math.isfinite(c), "the constant is {found}", found=c)
        m.require(known_equal(m.root.shape, y.shape), "the constant is larger than the product")
        m.require_no_other_user(y)
        m.require(linear.node is y.node or len(linear.node.users) == 1, "{at} is used elsewhere", at=linear)
        m.cover([y.node, linear.node])

    def rewrite(self, op, m, y, c):
        linear = _linear(m, y)
        call, scales = linear.call, m.root.op in ("mul", "div")
        weight, bias = call.args[WEIGHT[call.op]], call.args.get(BIAS.get(call.op, ""))
        wide = WIDE.get(y.dtype)
        constant = op.reshape(c, _channels(linear, y, c)) if isinstance(c, Value) else c
        constant = op.to(constant, dtype=wide) if isinstance(constant, Value) and wide else constant
        how = getattr(op, m.root.op)
        args = dict(call.args)
        if scales:
            args[WEIGHT[call.op]] = _changed(op, how, weight, _against_weight(op, call, weight, constant), wide)
        if isinstance(bias, Node):
            args[BIAS[call.op]] = _changed(op, how, bias, constant, wide)
        elif not scales:
            args[BIAS[call.op]] = _new_bias(op, m, linear, constant)
        if call.op == "convolution":  # by position: its bias must be given, and may be None
            result = op.call(torch.ops.aten.convolution.default, *(args.get(name) for name in op_parameters(call.op)))
        else:
            result = getattr(op, call.op)(**args)
        return result if linear.node is y.node else op.reshape(result, list(y.call.args["shape"]))

    examples = [
        fires(lambda x, w, c: (x @ w) * c, "f32[4, 8]", "f32[8, 6]", "f32[6]", **FROZEN),
        fires(lambda x, w: (x @ w.t()) / 4, "bf16[4, 8]", "bf16[6, 8]", **FROZEN),
        fires(lambda x, w, b, c: F.linear(x, w, b) * c, "f32[2, 4, 8]", "f32[6, 8]", "f32[6]", "f32[6]", **FROZEN),
        fires(lambda x, w, b, c: torch.addmm(b, x, w) - c, "f32[4, 8]", "f32[8, 6]", "f32[6]", "f32[1]", **FROZEN),
        fires(lambda x, w, b: F.conv2d(x, w, b) * 0.5, "f32[2, 3, 8, 8]", "f32[6, 3, 3, 3]", "f32[6]", **FROZEN),
        fires(lambda x, w, c: F.conv2d(x, w) + c, "f32[2, 3, 8, 8]", "f32[6, 3, 3, 3]", "f32[6, 1, 1]", **FROZEN),
        fires(lambda x, w, c: F.conv1d(x, w, groups=3) * c, "f32[2, 3, 8]", "f32[6, 1, 3]", "f32[1, 6, 1]", **FROZEN),
        fires(lambda x, w, c: (x @ w) * c, "f32[4, 8]", "f32[8, 6]", "f32[6]", dynamic=True, **FROZEN),
        fires(lambda x, w: (x @ w) * 2, "f32[0, 8]", "f32[8, 6]", **FROZEN),
        declines(lambda x, w, c: (x @ w) * c, "f32[4, 8]", "f32[8, 6]", "f32[6]", **ATEN),
        declines(lambda x, w, c: (x @ w) + c, "f32[4, 8]", "f32[8, 6]", "f32[6]", **FROZEN),
        declines(lambda x, w: (x @ w) * torch.inf, "f32[4, 8]", "f32[8, 6]", because="constant is inf", **FROZEN),
        declines(lambda x, w, c: (x @ w) / c, "f32[4, 8]", "f32[8, 6]", "f32[6]", because="may be 0", **FROZEN),
        declines(lambda x, w, c: (x @ w) * c, "f32[4, 8]", "f32[8, 6]", "f32[4, 1]", because="per channel", **FROZEN),
        declines(lambda x, w, c: (x @ w) * c, "f32[1, 8]", "f32[8, 6]", "f32[4, 6]", because="per channel", **FROZEN),
        declines(lambda x, w, c: (x @ w) * c, "f32[4, 8]", "f32[8, 6]", "f64[6]", because="becomes torch", **FROZEN),
        declines(lambda x, w: (y := x @ w, y * 2), "f32[4, 8]", "f32[8, 6]", because="used elsewhere", **FROZEN),
        declines(lambda x, w: (x @ w) * x[:, :1], "f32[4, 8]", "f32[8, 6]", because="not frozen", **FROZEN),
        declines(lambda x, w, b: torch.addmm(b, x, w, beta=2) * 2, "f32[4, 8]", "f32[8, 6]", "f32[6]",
                 because="alpha or beta", **FROZEN),
        declines(lambda x, w: F.conv_transpose2d(x, w) * 2, "f32[2, 3, 8, 8]", "f32[3, 6, 3, 3]",
                 because="transposed", **FROZEN),
    ]  # fmt: skip


def _linear(m: Match, y: Value) -> Any:
    """The product or convolution that computes y, directly or through a reshape; None if there is none."""
    call = y.call
    if call is not None and call.op == "reshape" and isinstance(call.args["self"], Node):
        inner = m.program.value(call.args["self"])
        same_columns = inner.rank == 2 and bool(y.rank) and known_equal(inner.shape[-1], y.shape[-1])
        return inner if same_columns and inner.op in ("matmul", "addmm") else None
    if call is None or call.op not in WEIGHT or call.mutates:
        return None
    return y if call.op == "convolution" or y.rank == 2 else None


def _channels(linear: Value, y: Value, c: Value) -> list[Any] | None:
    """The shape in which c is one number for each channel, or one for all; None if it is neither."""
    place = y.rank - 1 if linear.op != "convolution" else 1
    if c.rank > y.rank:
        return None
    shape = [1] * (y.rank - c.rank) + list(c.shape)
    others = [size for dim, size in enumerate(shape) if dim != place]
    if not all(known_equal(size, 1) for size in others):
        return None
    size = shape[place]
    return [size] if known_equal(size, 1) or known_equal(size, y.shape[place]) else None


def _against_weight(op: Emitter, call: Call, weight: Node, constant: Any) -> Any:
    """The factors as they broadcast against the weight: its columns for a product, its rows for a convolution."""
    if not isinstance(constant, Value) or call.op != "convolution":
        return constant
    rank = op.program.value(weight).rank
    return op.reshape(constant, [constant.shape[0], *[1] * (rank - 1)])


def _changed(op: Emitter, how: Any, value: Node, constant: Any, wide: torch.dtype | None) -> Value:
    if wide is None:
        return how(op.program.value(value), constant)
    narrow = op.program.value(value).dtype
    return op.to(how(op.to(value, dtype=wide), constant), dtype=narrow)


def _new_bias(op: Emitter, m: Match, linear: Value, constant: Any) -> Value:
    """A bias for a convolution that has none: per channel, the added constant or the negated subtracted one."""
    how = {"dtype": linear.dtype, "device": linear.device}
    zeros = op.full([linear.shape[1]], 0, **how)
    bias = op.add(zeros, constant) if m.root.op == "add" else op.sub(zeros, constant)
    return op.to(bias, dtype=linear.dtype) if bias.dtype != linear.dtype else bias
