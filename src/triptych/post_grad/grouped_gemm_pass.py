"""`grouped_gemm_pass`: on a CPU, computes matrix products that share their left operand as one product.

Stage 1 joins the linear layers that a program writes (`fuse_parallel_linear_pass`). This pass joins the products that
only ATen shows: of `einsum` and other decomposed operations, of the backward, of the user's own post-grad passes.

One product instead of several saves calls, and lets products of a few columns fill the vector registers. It reads and
computes as much as before, so large products gain nothing and are declined. `bench/cpu_gemms.py` on one core with AVX2,
float32, weights concatenated once: 512x256 by eight weights of 4 columns 2.5x, 8x256 by four of 8 columns 1.4x, 32x64
by three of 16 columns 1.1x, 1x512 by three of 512 columns 1.0x, 4x1024 by two of 2816 columns 0.9x.

On a CPU with instructions for bfloat16, a call takes longer than its arithmetic, and larger products gain. Compiled
with `freeze`, on one core of an EPYC with AVX-512, bfloat16, results returned: 512x256 by eight weights of 4 columns
3.0x, 8x256 by four of 8 columns 2.0x, 32x64 by three of 16 columns 1.6x, 256x64 by three of 64 columns 1.4x, 8x512 by
512, 128 and 128 columns 1.3x, 128x512 by two of 512 columns 1.0x. So both ways are timed where the cost model cannot
tell.

Weights are not packed for oneDNN (`mkldnn._linear_pointwise`): small products, those that gain from joining, take twice
as long with it, and its packed tensors have neither strides nor an address, which inputs of a compiled graph must have.
For large products, joined or not, it was 1.1x to 1.3x as quick in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import _private
from ..cost import UNKNOWN, DeviceModel, Operand, Product, Work
from ..cost.device import HALF
from ..cost.parts import MODEL_ERROR
from ..ir.facts import tensor_fact, tensor_of
from ..ir.program import Program
from ..pre_grad.fuse_parallel_linear_pass import JoinedWeights
from ..pre_grad.joined_products import ProductGroup, ProductNode, product_of
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires, others_are_weights
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .group_batch_fusion_passes import LINEAR
from .group_batch_fusion_passes import NAME as BATCH_FUSION
from .joined_on_cpu import concatenated, copies, in_rows, joined, require_quicker

LANES = 8
"""A vector register of AVX2 has this many float32: a product with fewer columns takes as long as one with this many.
In bfloat16 no such difference was measured."""

BATCHED = frozenset([BATCH_FUSION, LINEAR])
"""Either name adds the batching of products."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}
FROZEN: dict[str, Any] = {**ATEN, "prepare": others_are_weights, "options": {"freeze": True}}
SMALL = ("f32[4, 16]", "f32[16, 16]", "f32[8, 16]", "f32[8, 16]")
BIASED = ("f32[4, 16]", "f32[8, 16]", "f32[8]", "f32[6, 16]", "f32[6]")


@dataclass(frozen=True, kw_only=True)
class ProductOfViews(ProductNode):
    """A product whose weight or bias may be a view of an earlier value, so that the view can be recreated earlier."""

    sources: tuple[Node, ...]

    @property
    def operands(self) -> list[Node]:
        return [self.x, *self.sources]


class GroupedGemm(JoinedWeights):
    """mm(x, w), mm(x, v) -> split(mm(x, cat([w, v], 1)), 1), on a CPU where it is quicker; also addmm; up to rounding

    With `freeze`, weights are concatenated once. Otherwise each call concatenates them, which pays only for products of
    a few columns and many rows. A product with a bias is not joined with one without. The rule declines if the user has
    added `batch_linear_post_grad`, which also batches the operations on the results of the products.
    """

    def read(self, program: Program, node: Node) -> ProductNode | None:
        product, result = product_of(program, node), tensor_fact(node)
        if product is None or result is None or result.device.type != "cpu":
            return None
        chains = [_views(program, n) for n in (product.weight, product.bias) if n is not None]
        inner = (*product.inner, *(view for chain in chains for view in chain[:-1]))
        return ProductOfViews(
            node, product.x, product.weight, product.bias, product.turned, inner, sources=tuple(c[-1] for c in chains)
        )

    def check(self, m, group):
        options = m.program.options
        wanted = not BATCHED.isdisjoint(options.add_passes) and BATCHED.isdisjoint(options.remove_passes)
        m.require(not wanted, "{wanted} was added, which also batches the operations on the results", wanted=LINEAR)
        super().check(m, group)

    def require_gain(self, m: Match, group: ProductGroup, copied: Sequence[bool]) -> None:
        apart, together = _works(m.program, group)
        require_quicker(m, apart, together + copies(m.program, group, copied))

    def rewrite(self, op, group, copied):
        members = []
        for member in group.members:
            weight = _taken_again(op, member.weight, group.anchor)
            bias = None if member.bias is None else _taken_again(op, member.bias, group.anchor)
            members.append(replace(member, weight=weight, bias=bias))
        return super().rewrite(op, replace(group, members=tuple(members)), copied)

    examples = [
        fires(lambda x, q, k, v: (x @ q.t()).sum(-1) + ((x @ k.t()) * (x @ v.t())).sum(-1), *SMALL, **FROZEN),
        fires(lambda x, w, a, v, b: F.linear(x, w, a).sum() + F.linear(x, v, b).relu().sum(), *BIASED, **FROZEN),
        # weights of several dims, as those of an einsum: their views are taken before the first product
        fires(lambda x, w, v: (x @ w.view(16, 8)).sum() + (x @ v.view(16, 6)).sum(), "f32[4, 16]", "f32[16, 2, 4]",
              "f32[16, 2, 3]", **FROZEN),
        fires(lambda x, w, v: (x @ w).sum() + (x @ v).sum(), "bf16[4, 16]", "bf16[16, 8]", "bf16[16, 8]", **FROZEN),
        # the activation has another user between the products, and one of them is returned: its piece is copied
        fires(lambda x, w, v, u: ((x @ w).sum(), x.exp(), x @ v, (x @ u).sum()), "f32[4, 16]", "f32[16, 8]",
              "f32[16, 4]", "f32[16, 8]", **FROZEN),
        fires(lambda x, w, v: (x @ w).sum(1) + (x @ v).sum(1), "f32[0, 16]", "f32[16, 8]", "f32[16, 4]", **FROZEN),
        # weights that may change are concatenated on every call, for many rows and a few columns
        fires(lambda x, *w: sum((x @ v).relu().sum() for v in w), "f32[512, 256]", *["f32[256, 4]"] * 8, **ATEN),
        declines(lambda x, q, k, v: (x @ q.t()).sum(-1) + ((x @ k.t()) * (x @ v.t())).sum(-1), "f32[4, 256]",
                 *["f32[256, 256]"] * 3, because="would cost", **ATEN),
        declines(lambda x, w, v: (x @ w).sum() + (x @ v).sum(), "f32[4, 16]", "f32[16, 8]", "f32[16, 8]",
                 because="batch_linear_post_grad was added", dialects=("aten",), prepare=others_are_weights,
                 options={"freeze": True, "add_passes": "batch_linear_post_grad"}),
        # large products gain nothing, even if nothing is copied
        declines(lambda x, w, v: (x @ w).sum() + (x @ v).sum(), "f32[128, 256]", "f32[256, 256]", "f32[256, 256]",
                 because="would cost", **FROZEN),
        declines(lambda x, w, v: (x @ w, x @ v), "f32[1024, 16]", "f32[16, 8]", "f32[16, 8]", because="would cost",
                 **FROZEN),
        declines(lambda x, w, v, b: (x @ w).sum() + torch.addmm(b, x, v).sum(), "f32[4, 16]", "f32[16, 8]",
                 "f32[16, 8]", "f32[8]", **FROZEN),
        declines(lambda x, w, a, v, b: torch.addmm(a, x, w).sum() + torch.addmm(b, x, v).sum(), "f32[4, 16]",
                 "f32[16, 8]", "f32[4, 1]", "f32[16, 8]", "f32[4, 8]", **FROZEN),
        declines(lambda x, w, a, v: torch.addmm(a, x, w, beta=2).sum() + torch.addmm(a, x, v, alpha=3).sum(),
                 "f32[4, 16]", "f32[16, 8]", "f32[8]", "f32[16, 8]", **FROZEN),
        declines(lambda x, w, v: (x @ w).sum() + (x.double() @ v).sum(), "f32[4, 16]", "f32[16, 8]", "f64[16, 8]",
                 **FROZEN),
        declines(lambda x, w, v: (y := x @ w, x @ (v * y.sum()))[1], "f32[4, 16]", "f32[16, 8]", "f32[16, 8]",
                 because="used before", **FROZEN),
        declines(lambda x, w, v: ((x @ w).sum(), x[0].add_(1), (x @ v).sum())[::2], "f32[4, 16]", "f32[16, 8]",
                 "f32[16, 8]", **FROZEN),
        declines(lambda x, w, v: (x @ w).sum() + (x @ v).sum(), "f32[3, 4, 16]", "f32[3, 16, 8]", "f32[3, 16, 8]",
                 **FROZEN),
    ]  # fmt: skip


def _views(program: Program, node: Node) -> list[Node]:
    """The node, the value that it is a view of, and so on, up to a value that is not a view."""
    chain = [node]
    while isinstance(chain[-1].target, _private.OpOverload) and len(operands := chain[-1].all_input_nodes) == 1:
        effects = program.aliasing.effects(chain[-1])
        if not effects.pure or not effects.aliases or effects.may_copy:
            break
        chain.append(operands[0])
    return chain


def _taken_again(op: Emitter, node: Node, anchor: Node) -> Node:
    """The node itself if it stands before the anchor; otherwise the same view, emitted again."""
    if node < anchor:
        return node
    source = _taken_again(op, node.all_input_nodes[0], anchor)
    args = [source if arg is node.all_input_nodes[0] else arg for arg in node.args]
    return op.call(node.target, *args, **node.kwargs).node


@dataclass(frozen=True)
class NarrowProduct(Product):
    """A product that takes whole vector registers of a CPU, however few columns it has."""

    def seconds(self, model: DeviceModel) -> float:
        _, rows, columns, inner = self.sizes
        lanes = LANES if self.dtype == torch.float32 else 1
        return model.gemm(rows, lanes * math.ceil(columns / lanes), inner, self.dtype) - model.launch

    @property
    def kind(self) -> Any:
        """A library for CPUs divides a product by its sizes, so that a wider one may reach another rate."""
        return super().kind, self.right.shape[-1]


def _works(program: Program, group: ProductGroup) -> tuple[Work, Work]:
    """The products apart, and the joined one with what is concatenated for it on each call."""
    x, turned = tensor_of(group.members[0].x), group.members[0].turned
    # on a CPU with instructions for them, these dtypes are many times as fast as the model says
    error = UNKNOWN if x.dtype in HALF else MODEL_ERROR

    def product(weight: Operand, bias: Operand | None) -> NarrowProduct:
        return NarrowProduct(in_rows(x), weight if turned else weight.mT, bias, error=error)

    weights, biases = ([tensor_of(n) for n in nodes] for nodes in (group.weights, group.biases))
    each = zip_longest(map(Operand.of, weights), map(Operand.of, biases))
    dim = 1 if turned else 0
    together = Work.of(x.device, product(joined(weights, dim), joined(biases, 0) if biases else None))
    if not program.computed_once(*group.weights, *group.biases):
        together += [concatenated(weights, dim), *([concatenated(biases, 0)] if biases else [])]
    return Work.of(x.device, [product(weight, bias) for weight, bias in each]), together


@dataclass(frozen=True)
class GroupedGemmPass(Pass):
    """On a CPU, small matrix products that share their left operand become one, over concatenated weights."""

    name = "grouped_gemm_pass"

    def rules(self) -> Sequence[Rule]:
        return (GroupedGemm(),)
