"""`pass_patterns` of the joint stage: many small rules, one worklist."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.dtypes import lossless
from ..ir.program import Program, Value
from ..match.matcher import equal
from ..match.pattern import Dtype, Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from ..rules.merge_views import MergePermutes, MergeReshapes
from ..rules.noop_views import NoopReshape, NoopTo
from .bmm_to_mm import BmmToMm
from .fix_iota_device import FixIotaDevice
from .scatter_upon_const_tensor import ScatterUponConstTensor
from .softmax_scale import DivSoftmaxPattern, MulSoftmaxPattern

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
i8, i32, i64 = torch.int8, torch.int32, torch.int64


class PointlessConvert(Rule):
    """to(to(x, a), b) -> to(x, b), or x if that is its dtype, where a can represent every value of x"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, a: Dtype, b: Dtype):
        return op.to(op.to(x, dtype=a), dtype=b)

    def check(self, m, x, a, b):
        m.applies(x.known)
        m.applies(b == x.dtype or len(m.nodes[1].users) == 1, "the inner cast stays anyway")
        m.require(lossless(x.dtype, a), "{wanted} -> {found} loses values", at=m.nodes[1], wanted=x.dtype, found=a)
        to_integer = not (b.is_floating_point or b.is_complex or b == torch.bool)
        out_of_range = (x.is_float or a.is_floating_point) and to_integer and not lossless(x.dtype, b)
        m.require(
            not out_of_range, "the result of casting a float that is out of range depends on its dtype", at=m.nodes[1]
        )

    def rewrite(self, op, x, b):
        return x if b == x.dtype else op.to(x, dtype=b)

    examples = [
        fires(lambda x: x.to(f32).to(f16), "bf16[4, 8]"),
        fires(lambda x: x.to(f32).to(bf16) * 2, "bf16[4, 8]"),
        fires(lambda x: (y := x.to(f32), y.to(bf16) * 2), "bf16[4, 8]"),
        fires(lambda x: x.double().to(torch.bool), "f32[4, 8]"),
        fires(lambda x: x.to(i64).to(f32), "i32[4, 8]"),
        fires(lambda x: x.to(f16).to(f32), "u8[4, 8]"),
        declines(lambda x: x.to(f16).to(f32), "f32[4, 8]", because="loses values"),
        declines(lambda x: x.to(f64).to(i64), "i64[4, 8]", because="loses values"),
        declines(lambda x: x.to(i32).to(f32), "f32[4, 8]", because="loses values"),
        declines(lambda x: x.to(f64).to(i8), "f32[4, 8]", because="out of range"),
        declines(lambda x: x.to(f64).to(i8), "i32[4, 8]", because="out of range"),
        fires(lambda x: x.to(f64).to(i64), "i32[4, 8]"),
        declines(lambda x: x.to(f32).to(bf16), "bf16[4, 8]", because="leaves the graph"),
        declines(lambda x: (y := x.to(f32), y.to(f16)), "bf16[4, 8]"),
        declines(lambda x: x.to(f64), "f32[4, 8]"),
    ]


class PointlessView(NoopReshape):
    """view(x, shape of x) -> x"""

    examples = [
        fires(lambda x: x.view(4, 8) + 1, "f32[4, 8]"),
        declines(lambda x: x.view(8, 4) + 1, "f32[4, 8]"),
    ]


class PointlessViewPair(MergeReshapes):
    """view(view(x, a), b) -> view(x, b), or x if that is its shape"""

    examples = [
        fires(lambda x: x.view(32).view(8, 4) + 1, "f32[4, 8]"),
        fires(lambda x: x.view(32).view(4, 8) + 1, "f32[4, 8]"),
        declines(lambda x: (y := x.view(32), y.view(8, 4) + 1), "f32[4, 8]"),
    ]


class PointlessPermutePair(MergePermutes):
    """permute(permute(x, a), b) -> permute(x, a[b]), or x if they cancel"""

    examples = [
        fires(lambda x: x.permute(1, 2, 0).permute(1, 2, 0) + 1, "f32[4, 8, 2]"),
        fires(lambda x: x.permute(1, 0).permute(1, 0) + 1, "f32[4, 8]"),
        declines(lambda x: x.permute(1, 0).exp().permute(1, 0) + 1, "f32[4, 8]"),
    ]


class RemoveRedundantViews(Rule):
    """v(x), v(x) -> one v(x), for a view v"""

    FIRST_USERS = 64
    """Search budget: how many users of x are examined. Without it, n users of one tensor would take n * n steps."""

    def pattern(self, op, x: Tensor, a, b, c, d):
        return op.any_of(
            op.reshape(x, a), op.permute(x, a), op.expand(x, a, implicit=b), op.squeeze(x, dim=a),
            op.unsqueeze(x, a), op.slice(x, a, b, c, d), op.select(x, a, b),
        )  # fmt: skip

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        viewed = call.args.get("self")
        return not isinstance(viewed, Node) or len(viewed.users) > 1

    def check(self, m, x):
        earlier = self._equal_view(m, x)
        m.applies(earlier is not None)
        m.cover([earlier])

    def rewrite(self, op, m):
        return m.nodes[-1]

    def _equal_view(self, m: Match, x: Value) -> Node | None:
        root, call = m.root.node, m.root.call
        if call is None or len(x.node.users) == 1:
            return None
        for other in itertools.islice(x.node.users, self.FIRST_USERS):
            if other is root or not other < root:
                continue
            there = m.program.call(other)
            if there is None or there.op != call.op or there.mutates or there.args.keys() != call.args.keys():
                continue
            if all(equal(there.args[k], call.args[k]) for k in call.args):
                return other
        return None

    examples = [
        fires(lambda x: x.view(-1).relu() + x.view(-1).exp(), "f32[4, 8]"),
        fires(lambda x: x.t().relu() + x.transpose(0, 1).exp(), "f32[4, 8]"),
        fires(lambda x: x[1:].relu() + x[1:4].exp(), "f32[4, 8]"),
        fires(lambda x: x.unsqueeze(-1).relu() + x.unsqueeze(2).exp(), "f32[4, 8]"),
        fires(lambda x: x[0].relu() + x.select(0, 0).exp(), "f32[4, 8]"),
        fires(lambda x: x.view(-1).relu() + x.view(-1).exp(), "f32[4, 8]", dynamic=True),
        declines(lambda x: x[1:].relu() + x[:-1].exp(), "f32[4, 8]"),
        declines(lambda x: (x.view(-1), x.view(-1)), "f32[4, 8]", because="very tensor"),
        declines(lambda x: (x.view(-1) * 2, x.add_(1), x.view(-1) * 2)[::2], "f32[4, 8]", because="writes",
                 dialects=("torch",)),
    ]  # fmt: skip


@dataclass(frozen=True)
class PassPatterns(Pass):
    """Small rewrites on the joint graph: redundant casts, views and permutes, products with a batch of one, scales
    inside a softmax, scatters into constants, iotas on the wrong device."""

    name = "pass_patterns"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = [
    PointlessConvert(), NoopTo(), PointlessView(), PointlessViewPair(), PointlessPermutePair(), RemoveRedundantViews(),
    FixIotaDevice(), ScatterUponConstTensor(), MulSoftmaxPattern(), DivSoftmaxPattern(),
    BmmToMm(),
]  # fmt: skip
