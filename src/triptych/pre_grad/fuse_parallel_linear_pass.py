"""fuse_parallel_linear_pass: linear layers over one input as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..cost import device_model
from ..ir.facts import is_static, tensor_fact
from ..ir.program import ATEN, Program
from ..ir.sizes import elements
from ..kernels import triton_is_there
from ..kernels.registry import KERNEL_DTYPES
from ..passes.base import Pass, PassRun
from ..rewrite.checks import PlainTerms
from ..rewrite.emit import Emitter
from ..testing import declines, fires
from .parallel import (
    Group,
    Member,
    copied_pieces,
    emit_linear,
    joining_cost,
    member_of,
    op_of,
    pieces_cost,
    placed,
    product_cost,
    take_pieces,
    tensor_of,
    undisturbed,
)  # fmt: skip

JOINED, KERNEL = "joined_weights", "own_pointers"


def _key(program: Program, member: Member) -> tuple[Any, ...] | None:
    """What members must have in common; None for what is no linear layer over a known input."""
    x, weight, y = (tensor_fact(n) for n in (member.x, member.weight, member.node))
    if x is None or weight is None or y is None or x.dim() < 1 or weight.dim() != 2 or not is_static(weight.shape):
        return None
    bias = tensor_fact(member.bias) if member.bias is not None else None
    if member.bias is not None and (bias is None or tuple(bias.shape) != (member.out,) or bias.dtype != weight.dtype):
        return None
    op = op_of(program, member.node) if program.dialect == ATEN else ""
    return member.x, member.turned, weight.dtype, y.dtype, weight.device, op, member.wants_gradient


QKV = ("f32[4, 6, 16]", "f32[16, 16]", "f32[8, 16]", "f32[8, 16]")
BIASED = ("f32[4096, 64]", "f32[2]", "f32[64, 2]", "f32[3]", "f32[64, 3]")


def _attend(q: Any, k: Any, v: Any) -> Any:
    """For examples: what comes after query, key and value."""
    return q.sum(-1) + (k * v).sum(-1)


def _heads(q: Any, k: Any, v: Any) -> Any:
    """For examples: heads taken apart, which sees the strides of the layers' results, but does not show them."""
    q, k, v = (y.view(4, 6, -1, 8).transpose(1, 2) for y in (q, k, v))
    return (q @ k.transpose(-1, -2) @ v).transpose(1, 2).reshape(4, 6, -1)


class _Layers(torch.nn.Module):
    """For examples: layers whose weights are the model's own."""

    def __init__(self, inner: int, *outs: int) -> None:
        super().__init__()
        made = [torch.nn.Linear(inner, out).requires_grad_(False) for out in outs]
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> Any:
        return sum(layer(x).relu().sum() for layer in self.layers)


@dataclass(frozen=True)
class FuseParallelLinearPass(Pass):
    """Linear layers that share one input (query, key and value; gate and up) become one: over their weights side by
    side, where that is done once or the work hides it, or in one launch that reads each weight where it lies.

    Up to rounding: one product for several may sum in another order. Layers with and without bias are not joined,
    since a bias of 0.0 would turn -0.0 into 0.0; the kernel that reads each weight for itself takes both.
    """

    name: ClassVar[str] = "fuse_parallel_linear_pass"
    exact: ClassVar[bool] = False

    most_rows: int = 64
    """Up to so many rows one kernel that reads each weight for itself is as good as a product of joined weights."""
    own_pointers: bool | None = None
    """Use that kernel: always, never, or (None) on a GPU where it pays."""

    def run(self, run: PassRun) -> None:
        found: dict[tuple[Any, ...], list[Member]] = {}
        for node in run.program.graph.nodes:
            member = member_of(run.program, node)
            key = _key(run.program, member) if member is not None else None
            if member is not None and key is not None:
                found.setdefault(key, []).append(member)
        for members in found.values():
            if len(members) < 2:
                continue
            for part in undisturbed(run.program, members):
                self._fuse(run, part)

    def _fuse(self, run: PassRun, members: list[Member]) -> None:
        if len(members) < 2:
            return run.declined(JOINED, members[0].node, "the input or a weight is written between the layers")
        if self._kernel_runs(run, members[0]):
            group = placed(members)
            if group is not None and self._with_kernel(run, group):
                return None
        for biased in (True, False):
            alike = [m for m in members if (m.bias is not None) == biased]
            if len(alike) < 2:
                if alike:
                    run.declined(JOINED, alike[0].node, "no other layer over this input " + ("has" if biased else
                                 "lacks") + " a bias")  # fmt: skip
                continue
            group = placed(alike)
            if group is None:
                run.declined(JOINED, alike[0].node, "a result is used before the weights of the next layer are there")
            else:
                self._with_joined_weights(run, group)
        return None

    # ---- in one launch, every weight where it lies ----

    def _kernel_runs(self, run: PassRun, member: Member) -> bool:
        x, y = tensor_fact(member.x), tensor_fact(member.node)
        if x is None or y is None or x.dtype != y.dtype:  # autocast: the kernel takes what it is given
            return False
        if self.own_pointers is not None:
            return self.own_pointers
        on_gpu = x.device.type == "cuda" and run.options.codegen == "inductor" and triton_is_there()
        return on_gpu and x.dtype in KERNEL_DTYPES and elements(x.shape[:-1]) <= self.most_rows

    def _with_kernel(self, run: PassRun, group: Group) -> bool:
        program = run.program
        if program.computed_once(*group.weights, *group.biases) and self.own_pointers is None:
            return False  # the weights lie side by side before the first call
        # the gradients are products of their own either way
        before = product_cost(group.members[0].x, group.sizes)
        after = product_cost(group.members[0].x, [sum(group.sizes)])
        if not run.options.cuda_graphs:
            after = max(after, device_model(tensor_of(group.members[0].x).device).operator)
        if self.own_pointers is None and not run.pays(KERNEL, group.anchor, before, after):
            return False

        def make(op: Emitter) -> list[Any]:
            weights = [op.permute(m.weight, [1, 0]) if m.turned else m.weight for m in group.members]
            biased: Any = [i for i, m in enumerate(group.members) if m.bias is not None]
            biased = biased if 0 < len(biased) < len(group.members) else None
            target = torch.ops.triptych.parallel_linear.default
            made = op.call(target, group.members[0].x, weights, group.biases, biased)
            return [op.getitem(made, i) for i in range(len(group.members))]

        return self._replace(run, KERNEL, group, make, decided=self.own_pointers is None)

    # ---- over the weights side by side ----

    def _with_joined_weights(self, run: PassRun, group: Group) -> None:
        program, x = run.program, group.members[0].x
        known = tensor_fact(group.members[0].node)
        assert known is not None
        dim = known.dim() - 1
        copied = copied_pieces(program, group, [*known.shape[:-1], sum(group.sizes)], dim)
        before = product_cost(x, group.sizes, program.is_training)
        after = product_cost(x, [sum(group.sizes)], program.is_training)
        moved = joining_cost(program, group) + pieces_cost(program, group, copied)
        if not run.pays(JOINED, group.anchor, before, after + moved, sure=not moved):
            return
        self._replace(run, JOINED, group, _joined(group, copied, dim))

    def _replace(
        self, run: PassRun, what: str, group: Group, make: Callable[[Emitter], list[Any]], decided: bool = True
    ) -> bool:
        terms = PlainTerms(keeps_strides=False)
        done = run.replace(what, group.nodes, make, group.anchor, group.covered(), terms)
        if not done and decided:
            run.tally.decisions.pop()  # of a rewrite that was not made
        return done

    examples = [
        fires(lambda x, q, k, v: _attend(F.linear(x, q), F.linear(x, k), F.linear(x, v)), *QKV, dialects=["torch"]),
        fires(lambda x, q, k, v: _attend(x @ q.t(), torch.matmul(x, k.T), x.matmul(v.mT)), *QKV, dialects=["torch"]),
        fires(lambda x, g, u: F.silu(x @ g) * x.matmul(u), "f32[4096, 64]", "f32[64, 2]", "f32[64, 2]"),
        fires(lambda x, g, u: (x.mm(g.t()).relu() * torch.mm(x, u.t())).sum(), "f32[4096, 64]", "f32[2, 64]",
              "f32[2, 64]"),
        fires(lambda x, a, w, b, v: torch.addmm(a, x, w).relu().sum() + b.addmm(x, mat2=v).sum(), *BIASED),
        fires(lambda x, a, w, b, v: F.linear(x, bias=a, weight=w.t()).sum() + F.linear(x, v.t(), b).sum(), *BIASED,
              dialects=["torch"]),
        fires(_Layers(16, 16, 8, 8), "f32[4, 6, 16]", dialects=["torch"], dynamic=True, options={"freeze": True}),
        fires(lambda x, q, k, v: _attend(F.linear(x, q), F.linear(x, k), F.linear(x, v)),
              "bf16[2, 6, 16]", "bf16[16, 16]", "bf16[16, 16]", "bf16[16, 16]", dialects=["torch"]),
        fires(lambda x, q, k, v: _heads(F.linear(x, q), F.linear(x, k), F.linear(x, v)), *QKV, dialects=["torch"]),
        # returned values get memory of their own
        fires(lambda x, w, v: (F.linear(x, w), F.linear(x, v)), "f32[16]", "f32[8, 16]", "f32[8, 16]",
              options={"fuse_parallel_linear_pass.own_pointers": True}, dialects=["torch"]),
        fires(lambda x, w: (F.linear(x, w).relu() + F.linear(x, w)).sum(), "f32[4096, 64]", "f32[2, 64]",
              dialects=["torch"]),
        fires(lambda x, q, k, v: _attend(F.linear(x, q), F.linear(x, k), F.linear(x, v)),
              "f32[0, 6, 16]", "f32[16, 16]", "f32[8, 16]", "f32[8, 16]", dialects=["torch"]),
        # weights that stay as they are lie side by side before the first call, and cost nothing
        fires(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"], options={"freeze": True}),
        declines(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"], because="would cost"),
        # one launch, each weight where it lies, with a bias or without
        fires(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"],
              options={"fuse_parallel_linear_pass.own_pointers": True}),
        fires(lambda x, w, v, b: F.linear(x, w).sum() + F.linear(x, v, b), "f32[2, 3, 16]", "f32[8, 16]",
              "f32[4, 16]", "f32[4]", dialects=["torch"], options={"fuse_parallel_linear_pass.own_pointers": True}),
        declines(lambda x, w, v, b: F.linear(x, w).sum() + F.linear(x, v, b), "f32[2, 3, 16]", "f32[8, 16]",
                 "f32[4, 16]", "f32[4]", dialects=["torch"], because="a bias"),
        declines(lambda x, y, w, v: F.linear(x, w).sum() + F.linear(y, v).sum(), "f32[4, 16]", "f32[4, 16]",
                 "f32[8, 16]", "f32[8, 16]", dialects=["torch"]),
        declines(lambda x, w: F.linear(x, F.linear(x, w)), "f32[16, 16]", "f32[16, 16]", dialects=["torch"],
                 because="used before"),
        declines(lambda x, w, v: (F.linear(x, w), x.add_(1), F.linear(x, v))[::2], "f32[4, 16]", "f32[8, 16]",
                 "f32[8, 16]", dialects=["torch"], because="written between"),
        declines(lambda x, w, v: (F.linear(x, w), F.linear(x, v)), "f32[64, 16]", "f32[64, 16]", "f32[64, 16]",
                 dialects=["torch"], because="would cost"),
        declines(lambda x, w, v: (x @ w).sum() + (x @ v).sum(), "f32[4, 6, 16]", "f32[4, 16, 8]", "f32[4, 16, 8]"),
    ]  # fmt: skip


def _joined(group: Group, copied: list[bool], dim: int) -> Callable[[Emitter], list[Any]]:
    first = group.members[0]

    def make(op: Emitter) -> list[Any]:
        weight = op.cat(group.weights, dim=1 if first.turned else 0)
        bias = op.cat(group.biases) if group.biases else None
        whole = emit_linear(op, first, first.x, weight, bias)
        return take_pieces(op, whole, group, dim, copied)

    return make
