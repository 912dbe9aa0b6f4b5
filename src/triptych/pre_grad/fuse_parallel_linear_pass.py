"""fuse_parallel_linear_pass: fuses linear layers over one input into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Operand, OperatorCall, Work
from ..ir.facts import is_static, tensor_fact, tensor_of
from ..ir.program import ATEN, Program
from ..ir.refusal import Refusal
from ..ir.sizes import elements
from ..kernels import triton_is_there
from ..kernels.capture import is_launched
from ..kernels.registry import KERNEL_DTYPES
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .joined_products import (
    PRODUCTS,
    ProductGroup,
    ProductNode,
    copied_pieces,
    emit_linear,
    joining,
    op_of,
    pieces,
    placed,
    product_of,
    products,
    read_again,
    runs_with_one_key,
    surely_copied,
    take_pieces,
)  # fmt: skip

PARALLEL_LINEAR = torch.ops.triptych.parallel_linear.default


def _key(program: Program, member: ProductNode) -> tuple[Any, ...] | None:
    """What layers must have in common to be fused; None if a fact is missing, or an operand is not as in a linear
    layer."""
    x, weight, y = (tensor_fact(n) for n in (member.x, member.weight, member.node))
    if x is None or weight is None or y is None or x.dim() < 1 or weight.dim() != 2 or not is_static(weight.shape):
        return None
    bias = tensor_fact(member.bias) if member.bias is not None else None
    if member.bias is not None and (bias is None or tuple(bias.shape) != (member.out,) or bias.dtype != weight.dtype):
        return None
    op = op_of(program, member.node) if program.dialect == ATEN else ""
    return member.x, member.turned, weight.dtype, y.dtype, weight.device, op, member.wants_gradient


ALWAYS = {"own_pointers": True}
QKV = ("f32[4, 6, 16]", "f32[16, 16]", "f32[8, 16]", "f32[8, 16]")
BIASED = ("f32[4096, 64]", "f32[2]", "f32[64, 2]", "f32[3]", "f32[64, 3]")


def _attend(q: Any, k: Any, v: Any) -> Any:
    """For examples: a computation from query, key and value."""
    return q.sum(-1) + (k * v).sum(-1)


def _heads(q: Any, k: Any, v: Any) -> Any:
    """For examples: splits the layers' results into heads. The views depend on the strides of the results, but the
    output does not show them."""
    q, k, v = (y.view(4, 6, -1, 8).transpose(1, 2) for y in (q, k, v))
    return (q @ k.transpose(-1, -2) @ v).transpose(1, 2).reshape(4, 6, -1)


class _Layers(torch.nn.Module):
    """For examples: layers whose weights are parameters of the model."""

    def __init__(self, inner: int, *outs: int) -> None:
        super().__init__()
        layers = [torch.nn.Linear(inner, out).requires_grad_(False) for out in outs]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        return sum(layer(x).relu().sum() for layer in self.layers)


def _chained(x: Any, w: Any, v: Any) -> Any:
    """For examples: layers over the result of one of the layers before."""
    first, *others = (F.linear(x, weight) for weight in (w, v, v))
    return sum(y.sum() for y in (*others, *(F.linear(first, weight) for weight in (w, v, v))))


class OwnPointers(Rule):
    """linear(x, w), linear(x, v) -> triptych.parallel_linear(x, [w, v]), in one launch; up to rounding

    The kernel reads each weight in place. Some layers may have a bias and others none.
    """

    exact = False

    def __init__(self, most_rows: int = 64, own_pointers: bool | None = None) -> None:
        self.most_rows = most_rows
        self.own_pointers = own_pointers

    def sites(self, program: Program) -> Iterator[Match]:
        for run in runs_with_one_key(program, product_of, _key, program.calls_of(*PRODUCTS)):
            members = run.members
            if len(members) > 1 and self._kernel_runs(program, members[0]):
                group = placed(members)
                if group is not None:
                    yield group.site(program)

    def _kernel_runs(self, program: Program, member: ProductNode) -> bool:
        x, y = tensor_fact(member.x), tensor_fact(member.node)
        if x is None or y is None or x.dtype != y.dtype:  # autocast, which the kernel does not apply
            return False
        if self.own_pointers is not None:
            return self.own_pointers
        on_gpu = x.device.type == "cuda" and program.options.codegen == "inductor" and triton_is_there()
        return on_gpu and x.dtype in KERNEL_DTYPES and elements(x.shape[:-1]) <= self.most_rows

    def check(self, m, group):
        if self.own_pointers is not None:
            return
        is_constant = m.program.computed_once(*group.weights, *group.biases)
        m.applies(not is_constant, "the weights are concatenated once, before the first call")
        x = group.members[0].x
        device = tensor_of(x).device
        # the gradients are separate products either way
        m.pays(Work.of(device, products(x, group.sizes)), Work.of(device, _kernel(m.program, group)))

    def rewrite(self, op, group):
        weights = [op.permute(m.weight, [1, 0]) if m.turned else m.weight for m in group.members]
        results = op.call(PARALLEL_LINEAR, group.members[0].x, weights, group.biases, _with_bias(group))
        return tuple(op.getitem(results, i) for i in range(len(group.members)))

    examples = lazily(lambda: [
        fires(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"], settings=ALWAYS),
        fires(lambda x, w, v, b: F.linear(x, w).sum() + F.linear(x, v, b), "f32[2, 3, 16]", "f32[8, 16]",
              "f32[4, 16]", "f32[4]", dialects=["torch"], settings=ALWAYS),
        # each result has its own memory, so it may be returned
        fires(lambda x, w, v: (F.linear(x, w), F.linear(x, v)), "f32[16]", "f32[8, 16]", "f32[8, 16]",
              settings=ALWAYS, dialects=["torch"]),
        fires(_chained, "f32[4, 16]", "f32[16, 16]", "f32[8, 16]", settings=ALWAYS, dialects=["torch"]),
        declines(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"]),
        declines(lambda x, w: F.linear(x, F.linear(x, w)), "f32[16, 16]", "f32[16, 16]", dialects=["torch"],
                 settings=ALWAYS),
    ])  # fmt: skip


def _with_bias(group: ProductGroup) -> list[int] | None:
    """Which of the layers have a bias; None if all or none of them have one."""
    biased = [i for i, m in enumerate(group.members) if m.bias is not None]
    return biased if 0 < len(biased) < len(group.members) else None


def _kernel(program: Program, group: ProductGroup) -> OperatorCall:
    """All layers of a group in one launch."""
    x, which = tensor_of(group.members[0].x), _with_bias(group)
    biases = tuple(Operand.of(tensor_of(b)) for b in group.biases)
    weights = [Operand.of(tensor_of(m.weight)) for m in group.members]
    weights = [weight.mT if m.turned else weight for m, weight in zip(group.members, weights)]
    tensors = (x, *map(tensor_of, (*group.weights, *group.biases)))
    launched = program.options.is_replayed or is_launched(program.options, tensors)
    return OperatorCall(
        PARALLEL_LINEAR, (Operand.of(x), tuple(weights), biases, which and tuple(which)), precision=x.dtype,
        does=tuple(products(group.members[0].x, [sum(group.sizes)])), through_python=not launched,
    )  # fmt: skip


class JoinedWeights(Rule):
    """linear(x, w), linear(x, v) -> split(linear(x, cat([w, v]))); up to rounding

    Layers with and without bias are not joined, since a bias of 0.0 would turn -0.0 into 0.0.
    """

    exact = False

    def read(self, program: Program, node: Node) -> ProductNode | None:
        """The layer that a node computes, if it is one that the rule joins."""
        return product_of(program, node)

    def sites(self, program: Program) -> Iterator[Match]:
        for run in runs_with_one_key(program, self.read, _key, program.calls_of(*PRODUCTS)):
            members = run.members
            if len(members) < 2:
                problem = Refusal("a write or a region boundary separates the layers", at=run.disturbed_by)
                yield from (Match.at(program, m.node, problem=problem) for m in members)
                continue
            for biased in (True, False):
                nodes = [m.node for m in members if (m.bias is not None) == biased]
                yield from self._alike(program, read_again(program, nodes, self.read), biased)

    def _alike(self, program: Program, members: Sequence[ProductNode], biased: bool) -> Iterator[Match]:
        """Sites for layers that all have a bias, or all have none."""
        group = placed(members) if len(members) > 1 else None
        if group is not None:
            yield group.site(program)
        elif members:
            problem = "a result is used before the weights of the next layer are computed"
            if len(members) < 2:
                problem = f"no other layer over this input {'has' if biased else 'lacks'} a bias"
            yield Match.at(program, members[0].node, problem=problem)

    def check(self, m, group):
        fewest = surely_copied(m.program, group)
        self.require_gain(m, group, fewest)
        # only now: following strides takes longer, and most groups gain nothing even with the fewest copies
        shape = tensor_of(group.members[0].node).shape
        copied = copied_pieces(m.program, group, [*shape[:-1], sum(group.sizes)], len(shape) - 1)
        if copied != fewest:
            self.require_gain(m, group, copied)
        m.bindings["copied"] = copied

    def require_gain(self, m: Match, group: ProductGroup, copied: Sequence[bool]) -> None:
        """Leave the layers alone unless one layer is faster, with copies of some pieces of its result."""
        program, x = m.program, group.members[0].x
        device, training = tensor_of(x).device, program.is_training
        joined = Work.of(device, products(x, [sum(group.sizes)], training))
        moved = joining(program, group), pieces(program, group, copied)
        m.pays(Work.of(device, products(x, group.sizes, training)), joined + moved)

    def rewrite(self, op, group, copied):
        first = group.members[0]
        weight = op.cat(group.weights, dim=1 if first.turned else 0)
        bias = op.cat(group.biases) if group.biases else None
        whole = emit_linear(op, first, first.x, weight, bias)
        return take_pieces(op, whole, group, whole.rank - 1, copied)

    examples = lazily(lambda: [
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
        fires(lambda x, w: (F.linear(x, w).relu() + F.linear(x, w)).sum(), "f32[4096, 64]", "f32[2, 64]",
              dialects=["torch"]),
        fires(lambda x, q, k, v: _attend(F.linear(x, q), F.linear(x, k), F.linear(x, v)),
              "f32[0, 6, 16]", "f32[16, 16]", "f32[8, 16]", "f32[8, 16]", dialects=["torch"]),
        # weights that do not change are concatenated before the first call, at no cost per call
        fires(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"], options={"freeze": True}),
        declines(_Layers(256, 256, 64), "f32[2, 256]", dialects=["torch"], because="would cost"),
        declines(lambda x, w, v, b: F.linear(x, w).sum() + F.linear(x, v, b), "f32[2, 3, 16]", "f32[8, 16]",
                 "f32[4, 16]", "f32[4]", dialects=["torch"], because="a bias"),
        declines(lambda x, y, w, v: F.linear(x, w).sum() + F.linear(y, v).sum(), "f32[4, 16]", "f32[4, 16]",
                 "f32[8, 16]", "f32[8, 16]", dialects=["torch"]),
        declines(lambda x, w: F.linear(x, F.linear(x, w)), "f32[16, 16]", "f32[16, 16]", dialects=["torch"],
                 because="used before"),
        declines(lambda x, w, v: (F.linear(x, w), x.add_(1), F.linear(x, v))[::2], "f32[4, 16]", "f32[8, 16]",
                 "f32[8, 16]", dialects=["torch"], because="a write or a region boundary separates the layers"),
        declines(lambda x, w, v: (F.linear(x, w), F.linear(x, v)), "f32[64, 16]", "f32[64, 16]", "f32[64, 16]",
                 dialects=["torch"], because="would cost"),
        declines(lambda x, w, v: (x @ w).sum() + (x @ v).sum(), "f32[4, 6, 16]", "f32[4, 16, 8]", "f32[4, 16, 8]"),
        fires(_chained, "f32[4, 6, 16]", "f32[16, 16]", "f32[8, 16]", dialects=["torch"]),
    ])  # fmt: skip


@dataclass(frozen=True)
class FuseParallelLinearPass(Pass):
    """Fuses linear layers that share one input, such as query, key and value or gate and up, into one. Up to rounding,
    since one product may sum in another order than several.

    The layers become one layer with the concatenated weights, where these are concatenated before the first call or
    the copy costs less than is saved. Layers with and without a bias are not fused with each other, since a bias of 0.0
    would turn -0.0 into 0.0. For few input rows on a GPU, one kernel computes all layers and reads each weight in
    place; it takes layers with and without a bias together.
    """

    name: ClassVar[str] = "fuse_parallel_linear_pass"

    most_rows: int = 64
    """Up to this many input rows, one kernel that reads each weight in place is as fast as a product with the
    concatenated weights."""
    own_pointers: bool | None = None
    """Use that kernel: always, never, or (None) on a GPU where it pays."""

    def rules(self) -> Sequence[Rule]:
        return (OwnPointers(self.most_rows, self.own_pointers), JoinedWeights())
