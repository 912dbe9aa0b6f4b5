"""Folds a batch norm with fixed statistics, which is a factor and a shift for each channel, into the weights of
the layer before it.

Two passes use this: `fuse_conv_bn`, where the folded weights are computed once, and `efficient_conv_bn_eval`, where
they are computed on every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from ..ir.facts import known_equal
from ..ir.program import Value
from ..match.pattern import Pattern
from ..rewrite.emit import Emitter
from ..rewrite.rule import Match

CONVOLUTIONS = {"conv1d": 3, "conv2d": 4, "conv3d": 5}
TRANSPOSED = {"conv_transpose1d": 3, "conv_transpose2d": 4, "conv_transpose3d": 5}
RANKS: Mapping[str, int] = {**CONVOLUTIONS, **TRANSPOSED, "linear": 2}
"""Operations that are linear in their weight, with the rank of a result whose channels are dim 1."""

HALF = (torch.float16, torch.bfloat16)


def normed(op: Any, y: Any, mean: Any, var: Any, gamma: Any, beta: Any, training: Any, eps: Any, rest: Any) -> Pattern:
    """Pattern of batch_norm(y) in any spelling. Momentum and `cudnn_enabled` have no effect on fixed statistics."""
    momentum, cudnn = rest
    return op.batch_norm(
        y, weight=gamma, bias=beta, running_mean=mean, running_var=var, training=training, momentum=momentum, eps=eps,
        cudnn_enabled=cudnn,
    )  # fmt: skip


def require_foldable(m: Match) -> None:
    """Requires a convolution or linear layer whose only user is a batch norm with fixed statistics."""
    y = m["y"]
    call = y.call
    m.applies(call is not None and call.op in RANKS and not call.mutates, "no convolution or linear before the norm")
    m.require(m["training"] is False and m["mean"] is not None, "the norm uses the statistics of the batch")
    m.require_no_other_user(y)
    weight = m.program.value(call.args["weight"])
    for value in (y, weight, m["var"]):
        m.require(value.is_float, "not known to be a floating-point tensor", at=value, found=value.dtype)
    channels = "the channels of the norm are not those of the layer"
    m.require(y.rank == RANKS[call.op], channels, at=y, wanted=f"{RANKS[call.op]} dims", found=y.rank)
    for value in operands(m):
        if isinstance(value, Value):
            mixed = "the weights are on different devices"
            m.require(value.device == y.device, mixed, at=value, wanted=y.device, found=value.device)
    size = (y.shape[1],)
    mean, var = m["mean"], m["var"]
    m.require(
        known_equal(mean.shape, size),
        "the statistics are not one number per channel", at=mean, wanted=size, found=mean.shape,
    )  # fmt: skip
    for value in (mean, var):
        has_gradient = value.tensor is not None and value.tensor.requires_grad
        m.require(not has_gradient, "the statistics require a gradient", at=value)
    m.cover([y.node])


def operands(m: Match) -> list[Any]:
    """Everything that the folded weight and bias are computed from; None for an operand that is absent."""
    call = m["y"].call
    weight, bias = m.program.value(call.args["weight"]), call.args.get("bias")
    bias = m.program.value(bias) if isinstance(bias, Node) else None
    return [weight, bias, m["mean"], m["var"], m["gamma"], m["beta"]]


def fold(op: Emitter, m: Match) -> Value:
    """The convolution with the norm folded in: w * s and (b - mean) * s + beta, where s = gamma * rsqrt(var + eps)."""
    call = m["y"].call
    weight, bias, *norm = operands(m)
    wide = torch.float32 if weight.dtype in HALF else weight.dtype
    mean, var, gamma, beta = (_cast(op, v, wide) for v in norm)
    scale = op.rsqrt(op.add(var, m["eps"]))
    if gamma is not None:
        scale = op.mul(gamma, scale)
    if bias is None:
        shift = op.neg(op.mul(mean, scale)) if beta is None else op.sub(beta, op.mul(mean, scale))
    else:
        shift = op.mul(op.sub(_cast(op, bias, wide), mean), scale)
        shift = shift if beta is None else op.add(shift, beta)
    scaled = _scaled(op, call.op, _cast(op, weight, wide), scale, call.get("groups") or 1)
    narrow = (bias or weight).dtype
    folded = {"weight": _cast(op, scaled, weight.dtype), "bias": _cast(op, shift, narrow)}
    return getattr(op, call.op)(**{**call.args, **folded})


def _scaled(op: Emitter, name: str, weight: Value, scale: Value, groups: int) -> Value:
    """The weight with every output channel multiplied by its factor. In a transposed convolution the output channels
    are dim 1, group by group."""
    if name not in TRANSPOSED:
        return op.mul(weight, op.reshape(scale, [weight.shape[0], *(1,) * (weight.rank - 1)]))
    into, out, *kernel = weight.shape
    ones = (1,) * len(kernel)
    if groups == 1:
        return op.mul(weight, op.reshape(scale, [1, out, *ones]))
    by_group = op.reshape(weight, [groups, -1, out, *kernel])
    scaled = op.mul(by_group, op.reshape(scale, [groups, 1, out, *ones]))
    return op.reshape(scaled, [into, out, *kernel])


def _cast(op: Emitter, value: Any, dtype: torch.dtype) -> Any:
    return value if value is None or value.dtype == dtype else op.to(value, dtype=dtype)


# ---- for examples ----


def stirred(*modules: nn.Module, trained: bool = False) -> nn.Sequential:
    """The modules in sequence, in eval mode, with random weights and statistics as if they had been trained."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*modules).eval().requires_grad_(trained)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            with torch.no_grad():
                numbers = torch.rand(tensor.shape, generator=generator) + 0.5
                tensor.copy_(numbers if name.endswith("var") else numbers - 1)
    return model
