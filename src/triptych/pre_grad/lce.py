"""Linear compressed embeddings: a linear layer over the feature axis of x: (batch, n, d), y[b] = W x[b] + bias.

In user code this is `linear(x.transpose(1, 2), W, b).transpose(1, 2)`. There are four optional passes: two replace the
layer, without and with bias and epilogue, by a Triton kernel that reads x in place; one replaces it by a product with W
on the left; and one replaces several layers over one x by one product. The first three name the form that the user
wants: the cost model is told to the user, but does not decide. The last one declines where joining is slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Operand, OperatorCall, Part, Product, Work, read_and_written, size_hint
from ..cost.device import tf32_is_allowed
from ..ir.facts import is_static, known_equal, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.refusal import Refusal
from ..kernels.capture import is_launched
from ..match.pattern import Tensor
from ..rewrite.clones import copied_as
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires, lazily
from ..rewrite.passes import Pass
from ..rewrite.refusal import Refused
from ..rewrite.rule import FirstOf, Match, Rule
from .joined_products import (
    ProductNode,
    copied_pieces,
    joining,
    pieces,
    placed,
    runs_with_one_key,
    take_pieces,
)  # fmt: skip
from .permute_fusions import each_batch

LCE = torch.ops.triptych.lce.default
TURNED = [0, 2, 1]
SIMPLE = ("f32[2, 8, 5]", "f32[3, 8]")
NORMAL = ("f32[2, 8, 5]", "f32[3, 8]", "f32[3]")
SEVERAL = ("f32[2, 8, 16]", "f32[3, 8]", "f32[4, 8]", "f32[5, 8]")
EPILOGUES = ("relu", "sigmoid", "tanh", "gelu", "silu")


RATE, EXACT_RATE = 0.6, 0.05
"""The fraction of the GEMM rate that the kernel reaches: in general, and for exact products of float32, which take
0.21 ms on an H200 for 64 x 256 x 160 by 96 x 256."""


def layer(op: Any, x: Any, w: Any, **bias: Any) -> Any:
    """Pattern of such a layer before the final transpose: a linear, or a product with or without a sum."""
    transposed = op.permute(x, TURNED)
    product = op.matmul(transposed, op.permute(w, [1, 0]))
    added = [op.add(product, bias["bias"])] if bias else []
    return op.any_of(op.linear(transposed, w, **bias), *added, product)


def check_kernel(m: Match, x: Value, w: Value, b: Value | None = None) -> None:
    m.applies(x.rank == 3 and w.rank == 2, "not a linear layer over the feature axis")
    m.applies(b is None or isinstance(b, Value) and b.rank == 1, "the bias is not a vector")
    inside = [n for n in m.nodes if n is not m.root.node and not _is_view_of_operand(m, n)]
    used, user = next(((n, user) for n in inside for user in n.users if user not in m.nodes), (None, None))
    m.require(used is None, "{at} is used outside the pattern, by {found}", at=used, found=user)
    m.require(
        x.is_float and x.dtype == w.dtype == m.root.dtype,
        "the layer computes in {found}, but x is {wanted}", at=x, wanted=x.dtype, found=m.root.dtype,
    )  # fmt: skip


def _is_view_of_operand(m: Match, node: Node) -> bool:
    """Is the node a transpose of x or of the weight? These views may have users outside the pattern."""
    call = m.program.call(node)
    return call is not None and call.op == "permute" and call.args["self"] in (m["x"].node, m["w"].node)


def as_written(m: Match, x: Value, w: Value, adds: bool) -> Work:
    """The layer as it is written. `adds`: a pointwise kernel follows, for a bias or an epilogue."""
    features, result = tensor_of(x.node), tensor_of(m.root.node)
    layer: list[Part] = [for_each_batch(x, w)]
    if tensor_of(w.node).requires_grad:  # torch folds the batch into rows, with a copy of x
        batch, inner, places = (size_hint(size) for size in features.shape)
        folded = Product.sized(batch * places, size_hint(w.shape[0]), inner, features.dtype)
        layer = [read_and_written(features, times=2), folded]
    return Work.of(features.device, layer, [read_and_written(result, times=2)] if adds else [])


def for_each_batch(x: Value, w: Value, rate: float = 1.0) -> Product:
    """One product for each batch element, which read x in place."""
    features, weight = Operand.of(x.tensor), Operand.of(w.tensor)
    return Product(weight.for_each(features.shape[0]), features, rate=rate)


def by_kernel(m: Match, x: Value, w: Value, b: Value | None, epilogue: str, adds: bool) -> Work:
    """The layer as one call of the kernel, whose operator computes it as it is written on a CPU."""
    features, result, options = tensor_of(x.node), tensor_of(m.root.node), m.program.options
    if features.device.type != "cuda":
        copied = [] if lies_turned(m) else [read_and_written(result, times=2)]
        return as_written(m, x, w, adds) + copied
    operands = [tensor_of(value.node) for value in (x, w, b) if value is not None]
    launched = options.is_replayed or is_launched(options, operands)
    rate = EXACT_RATE if features.dtype == torch.float32 and not tf32_is_allowed() else RATE
    given = (*map(Operand.of, operands), *([None] if b is None else []), epilogue, lies_turned(m))
    does = (for_each_batch(x, w, rate),)
    return Work.of(
        features.device, OperatorCall(LCE, given, does=does, precision=features.dtype, through_python=not launched)
    )


def lies_turned(m: Match) -> bool:
    """Does the replaced value have the strides that the layer gives it, with the features innermost in memory?"""
    _, features, places = m.root.stride
    return not (known_equal(places, 1) and known_equal(features, m.root.shape[2]))


class SimpleLce(Rule):
    """linear(x.transpose(1, 2), W).transpose(1, 2) -> triptych.lce(x, W), without a copy of x; up to rounding"""

    asked_for = True
    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, w: Tensor):
        return op.permute(layer(op, x, w), TURNED)

    def check(self, m, x, w):
        check_kernel(m, x, w)
        m.pays(as_written(m, x, w, adds=False), by_kernel(m, x, w, None, "none", adds=False))

    def rewrite(self, op, x, w, m):
        return op.call(LCE, x, w, None, "none", lies_turned(m))

    examples = [
        fires(lambda x, w: F.linear(x.transpose(1, 2), w).transpose(1, 2), *SIMPLE, dialects=["torch"]),
        fires(lambda x, w: F.linear(x.permute(0, 2, 1), weight=w).mT.relu(), *SIMPLE, dialects=["torch"]),
        fires(lambda x, w: F.linear(x.swapaxes(-1, -2), w, None).movedim(-1, 1), *SIMPLE, dialects=["torch"]),
        fires(lambda x, w: F.linear(x.mT, w).mT, "bf16[2, 8, 5]", "bf16[3, 8]", dialects=["torch"]),
        fires(lambda x, w: F.linear(x.mT, w).mT, *SIMPLE, dialects=["torch"], dynamic=True),
        fires(lambda x, w: F.linear(x.mT, w).mT, "f32[0, 8, 5]", "f32[3, 8]", dialects=["torch"]),
        fires(lambda x, w: (t := x.mT, F.linear(t, w).mT), *SIMPLE, dialects=["torch"]),
        fires(lambda x, w: (x.transpose(1, 2) @ w.t()).mT, *SIMPLE, dialects=["torch"]),
        fires(lambda x, w: torch.matmul(x.mT, w.T).permute(0, 2, 1), *SIMPLE, dialects=["torch"], dynamic=True),
        declines(lambda x, w: (y := F.linear(x.mT, w), y.mT + 1), *SIMPLE, dialects=["torch"], because="outside"),
        declines(lambda x, w, b: F.linear(x.mT, w, b).mT, *NORMAL, dialects=["torch"]),
        declines(lambda x, w: F.linear(x, w).mT, "f32[2, 8, 8]", "f32[3, 8]", dialects=["torch"]),
        declines(lambda x, w: F.linear(x.mT, w), *SIMPLE, dialects=["torch"]),
        declines(lambda x, w: F.linear(x.permute(1, 2, 0), w).permute(0, 2, 1), "f32[8, 2, 5]", "f32[3, 8]",
                 dialects=["torch"]),
        declines(lambda x, w: (y := F.linear(x.mT, w), x.add_(1), y.mT)[2], *SIMPLE, dialects=["torch"],
                 because="in between"),
    ]  # fmt: skip


class NormalLce(Rule):
    """f(linear(x.transpose(1, 2), W, b).transpose(1, 2)) -> triptych.lce(x, W, b, f); up to rounding

    f is relu, sigmoid, tanh, gelu, silu or nothing, and may stand before the last transpose.
    """

    asked_for = True
    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, w: Tensor, b):
        inner = layer(op, x, w, bias=b)
        plain = op.permute(inner, TURNED)
        return op.any_of(op.one_of(EPILOGUES, plain), op.permute(op.one_of(EPILOGUES, inner), TURNED), plain)

    def check(self, m, x, w, b):
        check_kernel(m, x, w, b)
        epilogue = _epilogue(m)
        m.applies(b is not None or epilogue != "none", "there is neither a bias nor an epilogue")
        later = epilogue == "none" and [u for u in m.root.users if u.op in EPILOGUES and len(m.root.users) == 1]
        m.applies(not later, "it is matched together with its epilogue")
        m.pays(as_written(m, x, w, adds=True), by_kernel(m, x, w, b, epilogue, adds=True))

    def rewrite(self, op, x, w, b, m):
        return op.call(LCE, x, w, b, _epilogue(m), lies_turned(m))

    examples = [
        fires(lambda x, w, b: F.linear(x.transpose(1, 2), w, b).transpose(1, 2), *NORMAL, dialects=["torch"]),
        fires(lambda x, w, b: F.relu(F.linear(x.transpose(1, 2), w, b).transpose(1, 2)), *NORMAL, dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x.mT, w, bias=b).sigmoid().mT, *NORMAL, dialects=["torch"]),
        fires(lambda x, w, b: torch.tanh(F.linear(x.permute(0, 2, 1), w, b).mT), *NORMAL, dialects=["torch"]),
        fires(lambda x, w, b: F.gelu(F.linear(x.mT, w, b).mT), *NORMAL, dialects=["torch"]),
        fires(lambda x, w: F.silu(F.linear(x.mT, w).mT), *SIMPLE, dialects=["torch"]),
        fires(lambda x, w, b: (x.mT @ w.t() + b).mT.relu(), *NORMAL, dialects=["torch"]),
        fires(lambda x, w, b: torch.add(b, x.mT.matmul(w.t())).tanh().mT, *NORMAL, dialects=["torch"]),
        declines(lambda x, w: (x.mT @ w.t() + 1).mT, *SIMPLE, dialects=["torch"]),
        declines(lambda x, w, b: torch.add(x.mT @ w.t(), b, alpha=2).mT, *NORMAL, dialects=["torch"]),
        declines(lambda x, w, b: (x.mT @ w.t() + b[:, None]).mT, "f32[2, 8, 5]", "f32[3, 8]", "f32[5]",
                 dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x.mT, w, b).relu().mT, "bf16[2, 8, 5]", "bf16[3, 8]", "bf16[3]",
              dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x.mT, w, b).mT.relu(), *NORMAL, dialects=["torch"], dynamic=True),
        fires(lambda x, w, b: F.linear(x.mT, w, b).mT.softmax(1), *NORMAL, dialects=["torch"]),
        declines(lambda x, w: F.linear(x.mT, w).mT, *SIMPLE, dialects=["torch"]),
        declines(lambda x, w, b: F.gelu(F.linear(x.mT, w, b), approximate="tanh").mT, *NORMAL, dialects=["torch"]),
        declines(lambda x, w, b: (y := F.linear(x.mT, w, b), y.mT.relu()), *NORMAL, dialects=["torch"],
                 because="outside"),
        declines(lambda x, w, b: F.linear(x.mT, w, b).mT, "i64[2, 8, 5]", "i64[3, 8]", "i64[3]", dialects=["torch"],
                 because="computes in"),
    ]  # fmt: skip


def _epilogue(m: Match) -> str:
    """The pointwise operation among the matched nodes."""
    ops = [call.op for n in m.nodes if (call := m.program.call(n)) is not None]
    return next((op for op in ops if op in EPILOGUES), "none")


class MatmulLce(Rule):
    """linear(x.transpose(1, 2), W, b).transpose(1, 2) -> matmul(W, x) + b[:, None]; up to rounding

    The product has other strides than the layer. Where these are visible, the product is copied to the old strides,
    but only if it is smaller than x: the layer itself copies x where its weight is a parameter.
    """

    asked_for = True
    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, w: Tensor, b):
        return op.permute(layer(op, x, w, bias=b), TURNED)

    def check(self, m, x, w, b):
        check_kernel(m, x, w, b)

    def rewrite(self, op, x, w, b, m):
        def record(copied: bool) -> None:
            copies = [read_and_written(m.root.tensor, times=2)] if copied else []
            m.pays(as_written(m, x, w, adds=b is not None), Work.of(m.root.device, for_each_batch(x, w), copies))

        def with_new_strides() -> Value:
            record(copied=b is not None)  # by the kernel that adds the bias
            return product(op, x, w, b)

        def with_old_strides() -> Value:
            if size_hint(w.shape[0]) >= size_hint(w.shape[1]):
                sentence = "the strides of the result are visible, and to copy it costs more than copying x"
                raise Refused(sentence, at=w, wanted=f"fewer rows than {w.shape[1]}", found=w.shape[0])
            record(copied=True)
            return copied_as(op, product(op, x, w, b), m.root.tensor)

        return FirstOf(with_new_strides, with_old_strides)

    examples = [
        fires(lambda x, w, b: F.linear(x.transpose(1, 2), w, b).transpose(1, 2).sum(1), *NORMAL, dialects=["torch"]),
        fires(lambda x, w: F.linear(x.permute(0, 2, 1), w).mT.contiguous() * 2, *SIMPLE, dialects=["torch"]),
        fires(lambda x, w, v: v @ F.linear(x.mT, w).mT.relu(), *SIMPLE, "f32[4, 3]", dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x.mT, w, b).mT.reshape(-1, 5).sum(0), *NORMAL, dialects=["torch"],
              dynamic=True),
        fires(lambda x, w: F.linear(x.mT, w).mT.flatten(1), "bf16[2, 8, 5]", "bf16[3, 8]", dialects=["torch"]),
        fires(lambda x, w, b: F.linear(x.mT, w, b).mT, *NORMAL, dialects=["torch"]),
        fires(lambda x, w, b: (x.mT @ w.t() + b).mT.sum(1), *NORMAL, dialects=["torch"]),
        fires(lambda x, w: F.linear(x.transpose(1, 2), w).transpose(1, 2).relu(), *SIMPLE, dialects=["torch"],
              dynamic=True),
        declines(lambda x, w: F.linear(x.mT, w).mT, "f32[2, 8, 5]", "f32[8, 8]", dialects=["torch"],
                 because="costs more than copying x"),
        declines(lambda x, w: F.linear(x, w).mT.sum(1), "f32[2, 8, 8]", "f32[3, 8]", dialects=["torch"]),
    ]  # fmt: skip


def product(op: Emitter, x: Any, w: Any, b: Any) -> Any:
    """W x + b for every batch element. The weight is expanded over the batch, unless it needs a gradient: then torch
    chooses the form of the product, in which the weight's gradient is computed as one sum."""
    weight = op.program.value(getattr(w, "node", w))
    may_expand = not op.program.is_training or not tensor_of(weight.node).requires_grad
    y = op.matmul(each_batch(op, weight, tensor_of(getattr(x, "node", x)).shape[0]) if may_expand else weight, x)
    return y if b is None else op.add(y, op.unsqueeze(b, 1))


@dataclass(frozen=True)
class UseTritonLceReplaceSimpleLCE(Pass):
    """Replaces a linear layer over the feature axis, without a bias, by a Triton kernel that reads x in place and not a
    transposed copy. Up to rounding."""

    name: ClassVar[str] = "use_triton_lce_replace_simple_LCE"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (SimpleLce(),)


@dataclass(frozen=True)
class UseTritonLceReplaceNormalLCE(Pass):
    """Replaces a linear layer over the feature axis, with a bias or a pointwise operation after it, by a Triton kernel
    that reads x in place and applies both before it writes the result. Up to rounding."""

    name: ClassVar[str] = "use_triton_lce_replace_normal_LCE"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (NormalLce(),)


@dataclass(frozen=True)
class UseMatmulLceReplaceNormalLCE(Pass):
    """Replaces a linear layer over the feature axis by a product with the weight on the left, without transposes and
    without a custom kernel. Up to rounding.

    Where the strides of the layer's result are visible, the product is copied to these strides, if it is smaller than
    x; otherwise the pass declines.
    """

    name: ClassVar[str] = "use_matmul_lce_replace_normal_LCE"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (MatmulLce(),)


# ---- several layers over one x ----


def _sums(*values: Any) -> Any:
    """For examples: results in which the strides of the values are not visible."""
    return [v.sum(1) for v in values]


class FusedLce(Rule):
    """linear(x.mT, W).mT, linear(x.mT, V).mT -> split(cat([W, V]) @ x), along the features; up to rounding"""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        for run in runs_with_one_key(program, _member, _key, program.calls_of("permute")):
            members = run.members
            group = placed(members) if len(members) > 1 else None
            if group is not None:
                batch, _, places = tensor_of(group.members[0].x).shape
                copied = copied_pieces(program, group, [batch, sum(group.sizes), places], 1)
                yield group.site(program, copied=copied)
            elif members:
                problem = "an operand is written, or a result is used, between the layers"
                yield Match.at(program, members[0].node, problem=Refusal(problem, at=run.disturbed_by))

    def check(self, m, group, copied):
        program, x = m.program, tensor_of(group.members[0].x)
        # where a weight requires a gradient, torch folds the batch into rows, with a copy
        copies = len(group.members) if any(tensor_of(w).requires_grad for w in group.weights) else 0
        apart = Work.of(x.device, [_of_rows(x, out) for out in group.sizes], copies * [read_and_written(x, times=2)])
        joined = Work.of(x.device, _of_rows(x, sum(group.sizes)))
        m.pays(apart, joined + (joining(program, group), pieces(program, group, copied)))

    def rewrite(self, op, group, copied):
        bias = op.cat(group.biases) if group.biases else None
        whole = product(op, group.members[0].x, op.cat(group.weights), bias)
        return take_pieces(op, whole, group, 1, copied)

    examples = lazily(lambda: [
        fires(lambda x, w, v, u: _sums(F.linear(x.mT, w).mT, F.linear(x.mT, v).mT, F.linear(x.mT, u).mT), *SEVERAL,
              dialects=["torch"]),
        fires(lambda x, w, v, u: _sums(*[F.linear(x.transpose(1, 2), i).permute(0, 2, 1) for i in (w, v, u)]),
              *SEVERAL, dialects=["torch"]),
        fires(lambda x, w, b, v, c: _sums(F.linear(x.mT, w, b).mT, F.linear(x.mT, v, bias=c).mT), "f32[64, 64, 64]",
              "f32[1, 64]", "f32[1]", "f32[2, 64]", "f32[2]", dialects=["torch"]),
        fires(lambda x, w, v: (F.linear(x.mT, w).mT, F.linear(x.mT, v).mT.relu()), "f32[64, 64, 64]",
              torch.randn(4, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True), dialects=["torch"]),
        declines(lambda x, w, v, u: _sums(F.linear(x.mT, w).mT), *SEVERAL, dialects=["torch"]),
        declines(lambda x, w, v, u: _sums(F.linear(x.mT, w).mT, F.linear(x.relu().mT, v).mT), *SEVERAL,
                 dialects=["torch"]),
        declines(lambda x, w, v, u: (F.linear(x.mT, w).mT.sum(), x.add_(1), F.linear(x.mT, v).mT.sum())[::2],
                 *SEVERAL, dialects=["torch"], because="between"),
        declines(lambda x, w, v: _sums(F.linear(x.mT, w).mT, F.linear(x.mT, v).mT), "f32[1, 256, 2]",
                 "f32[256, 256]", "f32[256, 256]", dialects=["torch"], because="would cost"),
    ])  # fmt: skip


def _of_rows(x: torch.Tensor, rows: int) -> Product:
    """One product for each batch element, with a weight of so many rows."""
    features = Operand.of(x)
    weight = Operand.contiguous((rows, features.shape[1]), x.dtype)
    return Product(weight.for_each(features.shape[0]), features)


def _key(program: Program, member: ProductNode) -> tuple[Any, ...]:
    """What layers must have in common to share one product."""
    weight, y = tensor_of(member.weight), tensor_of(member.node)
    return member.x, member.bias is None, weight.dtype, weight.device, y.dtype, member.wants_gradient


def _member(program: Program, node: Node) -> ProductNode | None:
    """The layer over the feature axis that ends at this node, with the transposes around it; None if there is none."""
    back = program.call(node)
    if back is None or back.op != "permute" or list(back.args["dims"]) != TURNED:
        return None
    inner = back.args["self"]
    call = program.call(inner)
    if call is None or call.op != "linear":
        return None
    transpose = program.call(call.args["input"])
    if transpose is None or transpose.op != "permute" or list(transpose.args["dims"]) != TURNED:
        return None
    weight = tensor_fact(call.args["weight"])
    if weight is None or weight.dim() != 2 or not is_static(weight.shape):
        return None
    inside = (inner, call.args["input"])
    return ProductNode(node, transpose.args["self"], call.args["weight"], call.args.get("bias"), inner=inside)


@dataclass(frozen=True)
class UseMatmulFuseLceReplaceFirstLCE(Pass):
    """Replaces several linear layers over the feature axis of one x by one product with the concatenated weights, whose
    result is split along the features. Up to rounding."""

    name: ClassVar[str] = "use_matmul_fuse_lce_replace_first_LCE"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (FusedLce(),)
