"""Views, copies and casts that change nothing: rules that `remove_noop_pass` and `remove_noop_ops` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from ..ir.calls import Call
from ..ir.effects import DROPOUTS, returned_operand
from ..ir.facts import interchangeable, tensor_fact
from ..ir.program import Program
from ..match.pattern import Is, Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule

f16, f32, f64 = torch.float16, torch.float32, torch.float64
channels_last = torch.channels_last


class Noop(Rule, ABC):
    """f(x) -> x, where shape, dtype, device and strides stay the same

    The rewriter checks whether anything can see that x and f(x) share memory now, or no longer do.
    """

    @abstractmethod
    def pattern(self, op: Any) -> Any: ...

    def check(self, m: Match, x: Any) -> None:
        old, new = m.root.fact, x.fact
        m.applies(
            old is None or new is None or interchangeable(old, new),
            "the result differs in shape, dtype, device or strides",
        )

    def rewrite(self, op: Any, x: Any) -> Any:
        return x


class NoopView(Noop, ABC):
    """v(x) -> x, for a view v whose result is like x"""

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        old, new = tensor_fact(node), tensor_fact(call.args.get("self"))
        return old is None or new is None or interchangeable(old, new)


def add_in_place(x: Any, y: Any) -> Any:
    """For examples: a write to y, which x sees only if the two share memory."""
    y.add_(1)
    return x * 2


class NoopReshape(NoopView):
    """reshape(x, shape of x) -> x"""

    def pattern(self, op, x: Tensor, shape):
        return op.reshape(x, shape)

    examples = [
        fires(lambda x: x.view(4, 8) + 1, "f32[4, 8]"),
        fires(lambda x: x.reshape(-1, 8).relu(), "f32[4, 8]"),
        fires(lambda x: x.flatten(1).exp(), "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: x.view(x.shape) + 1, "f32[4, 8]", dynamic=True),
        fires(lambda x: x.view(0, 8) + 1, "f32[0, 8]"),
        fires(lambda x: x.view(()) + 1, "f32[]"),
        fires(lambda x: add_in_place(x, x.view(4, 8)), "f32[4, 8]"),  # one memory before and after
        declines(lambda x: x.view(8, 4) + 1, "f32[4, 8]"),
        declines(lambda x: x.view(4, 8), "f32[4, 8]", because="very tensor"),
        declines(lambda x: x.t().reshape(-1).view(4, 4) + 1, "f32[4, 4]"),
        declines(lambda x: x.view(x.shape[1], -1) + 1, "f32[4, 8]", dynamic=True),
    ]


class NoopPermute(NoopView):
    """permute(x, dims) -> x, where every dim of more than one element stays in its place"""

    def pattern(self, op, x: Tensor, dims):
        return op.permute(x, dims)

    examples = [
        fires(lambda x: x.permute(0, 1) + 1, "f32[4, 8]"),
        fires(lambda x: x.transpose(-1, 1) + 1, "f32[4, 8]"),
        fires(lambda x: x.t() + 1, "f32[8]"),
        fires(lambda x: x.transpose(0, 1) + 1, "f32[1, 1, 8]"),
        declines(lambda x: x.t() + 1, "f32[4, 4]"),
        declines(lambda x: x.permute(0, 1), "f32[4, 8]", because="very tensor"),
    ]


class NoopExpand(NoopView):
    """expand(x, shape of x) -> x"""

    def pattern(self, op, x: Tensor, size):
        return op.expand(x, size)

    examples = [
        fires(lambda x: x.expand(4, -1) + 1, "f32[4, 8]"),
        fires(lambda x: x.broadcast_to((4, 8)) + 1, "f32[4, 8]"),
        fires(lambda x: x.expand(x.shape) + 1, "f32[4, 8]", dynamic=True),
        fires(lambda x, y: x.expand_as(y) + y, "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x: x.expand(4, 8) + 1, "f32[1, 8]"),
        declines(lambda x: x.expand(1, 4, 8) + 1, "f32[4, 8]"),
    ]


def _only_slices(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, slice) or i is Ellipsis for i in items)


Slices = Annotated[Any, Is("slices", _only_slices)]
Zeros = Annotated[Any, Is("zeros", lambda pad: isinstance(pad, list) and all(type(p) is int and p == 0 for p in pad))]


class NoopSlice(NoopView):
    """slice(x, start, end) -> x, where the slice is all of x"""

    def pattern(self, op, x: Tensor, dim, start, end, step, index: Slices):
        return op.slice(x, dim, start, end, step) | op.tensor_getitem(x, index)

    examples = [
        fires(lambda x: x[:] + 1, "f32[4, 8]"),
        fires(lambda x: x[0:4] + 1, "f32[4, 8]"),
        fires(lambda x: x[:, -8:100] + 1, "f32[4, 8]"),
        fires(lambda x: x[...] + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: x.narrow(1, 0, 8) + 1, "f32[4, 8]"),
        fires(lambda x: x[: x.shape[0]] + 1, "f32[4, 8]", dynamic=True),
        declines(lambda x: x[1:] + 1, "f32[4, 8]"),
        declines(lambda x: x[::2] + 1, "f32[4, 8]"),
        declines(lambda x, i: x[i] + 1, "f32[4, 8]", torch.tensor([3, 2, 1, 0])),
        declines(lambda x: x[None] + 1, "f32[4, 8]"),
        declines(lambda x: x[:], "f32[4, 8]", because="very tensor"),
    ]


class NoopSqueeze(NoopView):
    """squeeze(x) -> x, where none of the dims has size 1"""

    def pattern(self, op, x: Tensor, dim):
        return op.squeeze(x, dim=dim)

    examples = [
        fires(lambda x: x.squeeze() + 1, "f32[4, 8]"),
        fires(lambda x: x.squeeze(-1) + 1, "f32[4, 8]"),
        fires(lambda x: torch.squeeze(x, (0, 1)) + 1, "f32[4, 8]"),
        declines(lambda x: x.squeeze(0) + 1, "f32[1, 8]"),
    ]


class NoopContiguous(Noop):
    """contiguous(x, format) -> x, where x has that memory format already"""

    def pattern(self, op, x: Tensor, memory_format):
        return op.contiguous(x, memory_format=memory_format)

    examples = [
        fires(lambda x: x.contiguous() + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: x.contiguous(), "f32[4, 8]", dialects=("torch",)),  # it is x: the caller sees no difference
        fires(lambda x: x.relu().contiguous().contiguous() + 1, "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: x.t().contiguous() + 1, "f32[4, 8]"),
        declines(lambda x: x.contiguous(memory_format=channels_last) + 1, "f32[2, 3, 4, 5]"),
        declines(lambda x: x.expand(4, 8).contiguous() + 1, "f32[8]"),
    ]


class NoopTo(Noop):
    """to(x, dtype of x, device of x) -> x"""

    def pattern(self, op, x: Tensor, dtype, device, non_blocking, memory_format):
        return op.to(x, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format)

    examples = [
        fires(lambda x: x.to(f32) + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: x.float(), "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: x.to("cpu", f32).type(f32).cpu() + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x, y: x.type_as(y) + y, "f32[4, 8]", "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: torch.ops.aten._to_copy(x, dtype=f32) + 1, "f32[4, 8]", dialects=("aten",)),
        fires(
            lambda x: torch.ops.aten._to_copy(x, layout=torch.strided, device=x.device, pin_memory=False) + 1,
            "f32[4, 8]", dialects=("aten",),
        ),
        fires(lambda x: torch.ops.prims.convert_element_type(x, f32) + 1, "f32[4, 8]", dialects=("aten",)),
        declines(lambda x: x.to(f64) + 1, "f32[4, 8]"),
        declines(lambda x: x.to(f32, copy=True), "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: x.to(f32, copy=True), "f32[4, 8]", because="share other memory", dialects=("aten",)),
        declines(lambda x: torch.ops.aten._to_copy(x, dtype=f32), "f32[4, 8]", dialects=("aten",), because="leaves"),
        # the strides of a size-1 dim decide the memory format of the convolution's result
        declines(lambda x, w: F.conv2d(x.to(memory_format=channels_last), w), "f32[2, 1, 4, 5]", "f32[3, 1, 2, 2]"),
    ]  # fmt: skip


class NoopClone(Noop):
    """clone(x) -> x, where neither a write nor the caller can tell the two apart"""

    without_facts = True

    def pattern(self, op, x: Tensor, memory_format):
        return op.clone(x, memory_format=memory_format)

    def check(self, m, x, memory_format):
        m.require(x.known or memory_format in (None, torch.preserve_format), "strides are not known")
        super().check(m, x)

    examples = [
        fires(lambda x: x.clone() + 1, "f32[4, 8]"),
        fires(lambda x: x.clone(memory_format=torch.contiguous_format) + 1, "f32[4, 8]"),
        fires(lambda x: x.exp().clone(), "f32[4, 8]"),
        declines(lambda x: x.clone(), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: (y := x.exp(), y.clone()), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: x.t().clone(memory_format=torch.contiguous_format) + 1, "f32[4, 8]"),
        declines(lambda x: add_in_place(x, x.clone()), "f32[4, 8]", because="written", dialects=("torch",)),
        declines(lambda x: (y := x.clone(), x.add_(1), y + 1), "f32[4, 8]", because="written"),
    ]


class NoopLift(Noop):
    """lift_fresh_copy(constant) -> constant, where nothing writes it"""

    def pattern(self, op, x: Tensor):
        return op.one_of(["lift_fresh_copy", "lift_fresh", "lift"], x)

    examples = [
        fires(lambda x: x + torch.tensor([1.0, 2.0]), "f32[2]", dialects=("aten",)),
        declines(lambda x: (x + 1, torch.tensor([1.0, 2.0])), "f32[2]", dialects=("aten",), because="leaves"),
    ]


class NoopAlias(Noop):
    """alias(x) -> x"""

    without_facts = True

    def pattern(self, op, x: Tensor):
        return op.alias(x)

    examples = [
        fires(lambda x: torch.ops.aten.alias(x) + 1, "f32[4, 8]"),
        declines(lambda x: torch.ops.aten.alias(x), "f32[4, 8]", because="very tensor"),
    ]


class NoopCat(Noop):
    """cat([x]) -> x"""

    def pattern(self, op, x: Tensor, dim):
        return op.cat([x], dim=dim)

    examples = [
        fires(lambda x: torch.cat([x]) + 1, "f32[4, 8]"),
        fires(lambda x: torch.concat((x,), dim=-1) + 1, "f32[4, 8]"),
        fires(lambda x: torch.cat([x]) + 1, "f32[0]"),
        declines(lambda x, y: torch.cat([x, y]) + 1, "f32[4, 8]", "f32[0]"),
        declines(lambda x: torch.cat([x]), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: torch.cat([x.t()]) + 1, "f32[4, 8]"),
    ]


class NoopRepeat(Noop):
    """repeat(x, ones) -> x"""

    def pattern(self, op, x: Tensor, times):
        return op.repeat(x, times) | op.tile(x, times)

    examples = [
        fires(lambda x: x.repeat(1, 1) + 1, "f32[4, 8]"),
        fires(lambda x: x.tile((1,)) + 1, "f32[4, 8]"),
        declines(lambda x: x.repeat(1, 1, 1) + 1, "f32[4, 8]"),
        declines(lambda x: x.repeat(2, 1) + 1, "f32[4, 8]"),
        declines(lambda x: x.repeat(1, 1), "f32[4, 8]", because="leaves the graph"),
    ]


class NoopPad(Noop):
    """pad(x, zeros) -> x"""

    def pattern(self, op, x: Tensor, pad: Zeros, mode, value):
        return op.pad(x, pad, mode=mode, value=value) | op.constant_pad_nd(x, pad, value)

    examples = [
        fires(lambda x: F.pad(x, (0, 0)) + 1, "f32[4, 8]"),
        declines(lambda x: F.pad(x, (0, 1)) + 1, "f32[4, 8]"),
        declines(lambda x: F.pad(x, (-1, 1)) + 1, "f32[4, 8]"),
        declines(lambda x: F.pad(x, (0, 0)), "f32[4, 8]", because="leaves the graph"),
    ]


class NoopConj(Noop):
    """conj(x), real(x) -> x, where x is real"""

    def pattern(self, op, x: Tensor):
        return op.one_of(["conj", "conj_physical", "resolve_conj", "real"], x)

    def check(self, m, x):
        m.applies(x.known and not x.dtype.is_complex)
        super().check(m, x)

    examples = [
        fires(lambda x: x.conj().real + torch.real(x), "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: torch.view_as_real(x.conj().resolve_conj()), "c64[4, 8]"),
    ]


class NoopCopy(Noop):
    """copy(y, x) -> x; slice_scatter(y, x) over all of y -> x"""

    mixed_dtypes = True

    def pattern(self, op, y: Tensor, x: Tensor, non_blocking, dim, start, end, step):
        return op.copy(y, x, non_blocking=non_blocking) | op.slice_scatter(y, x, dim, start, end, step)

    examples = [
        fires(lambda x: x.new_empty(4, 8).copy_(x) + 1, "f32[4, 8]", dialects=("aten",)),
        fires(lambda x, y: torch.slice_scatter(y, x, 0, 0, 4) + 1, "f32[4, 8]", "f32[4, 8]"),
        declines(lambda x: x.new_empty(4, 8, dtype=f64).copy_(x) + 1, "f32[4, 8]", dialects=("aten",)),
        declines(lambda x, y: torch.slice_scatter(y, x, 0, 0, 3) + 1, "f32[3, 8]", "f32[4, 8]"),
        declines(lambda x, y: torch.slice_scatter(y, x, 0, 0, 4), "f32[4, 8]", "f32[4, 8]", because="leaves"),
    ]


class NoopIdentity(Noop):
    """nn.Identity()(x) -> x"""

    def pattern(self, op, x: Tensor):
        return op.identity(x)

    examples = [
        fires(nn.Sequential(nn.Identity(), nn.ReLU()), "f32[4, 8]", dialects=("modules",)),
        declines(nn.Sequential(nn.ReLU()), "f32[4, 8]", dialects=("modules",)),
    ]


class NoopDropout(Noop):
    """dropout(x, p, train) -> x, where train is False or p is 0"""

    def pattern(self, op, x: Tensor, p, train):
        return op.one_of(sorted(DROPOUTS), x, p, train)

    def check(self, m):
        m.applies(returned_operand(m.root.call) is not None, "the dropout may drop elements")

    examples = [
        fires(lambda x: F.dropout(x, 0.5, training=False) + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: F.dropout(x, 0.0, training=True) + 1, "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: F.dropout(x, 0.5, training=False, inplace=True), "f32[4, 8]", dialects=("torch",)),
        fires(lambda x: F.dropout2d(x, 0.5, training=False) + 1, "f32[2, 4, 8, 8]", dialects=("torch",)),
        fires(nn.Sequential(nn.Dropout(0.5), nn.ReLU()).eval(), "f32[4, 8]", dialects=("modules",)),
        declines(lambda x: F.dropout(x, 0.5) + 1, "f32[4, 8]", dialects=("torch",)),
        declines(nn.Sequential(nn.Dropout(0.5), nn.ReLU()), "f32[4, 8]", dialects=("modules",)),
    ]


VIEWS_AND_COPIES: list[Rule] = [
    NoopReshape(), NoopPermute(), NoopExpand(), NoopSlice(), NoopSqueeze(), NoopContiguous(), NoopTo(), NoopClone(),
    NoopLift(), NoopAlias(), NoopCat(), NoopRepeat(), NoopPad(), NoopConj(), NoopCopy(), NoopIdentity(),
    NoopDropout(),
]  # fmt: skip
