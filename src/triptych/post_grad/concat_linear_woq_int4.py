"""`concat_linear_woq_int4`: int4 weight-only linears of one activation, on a CPU, are computed in one call.

Why the packed weights can be concatenated: a weight of N rows is packed in blocks of 64 rows (AVX-512), 32 (AVX2) or 16
(128-bit vectors), each contiguous, and only the last block may be smaller. The kernel computes each block of result
columns from one such block alone. So the concatenation of weights is the packed form of the concatenated weight if all
but the last have whole blocks: a multiple of 64 rows is one on every CPU. The results then have the same bits.

It saves calls: compiled, on one core of an EPYC with AVX-512, three products of 1 or 4 rows of bfloat16 with weights of
256 rows and columns take 1.1x as long apart as joined. Where pieces of the result are copied, both ways are timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..cost import device_model, size_hint
from ..ir.facts import is_static, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..pre_grad.joined_products import (
    Product,
    ProductGroup,
    copied_pieces,
    pieces_cost,
    placed,
    runs_with_one_key,
    take_pieces,
)
from ..rewrite.examples import declines, fires, others_are_weights
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .joined_on_cpu import JoinedOnCpu, Operand, require_quicker

INT4_MM = torch.ops.aten._weight_int4pack_mm_for_cpu.default
BLOCK = 64
"""A multiple of the rows that any CPU's kernel packs together."""


@dataclass(frozen=True, kw_only=True)
class Int4Product(Product):
    """x @ dequantized(weight).T, for a packed weight (out, k / 2)."""

    scales: Node
    """Scale and zero of each group of `group_size` elements, (k / group_size, out, 2)."""
    group_size: int

    @property
    def operands(self) -> list[Node]:
        return [self.x, self.weight, self.scales]

    @property
    def has_whole_blocks(self) -> bool:
        return self.out % BLOCK == 0


def _read(program: Program, node: Node) -> Int4Product | None:
    if node.target is not INT4_MM or (call := program.call(node)) is None:
        return None
    x, weight, group_size, scales = (call.args[name] for name in ("self", "mat2", "qGroupSize", "qScaleAndZeros"))
    facts = [tensor_fact(n) for n in (node, x, weight, scales)]
    if any(t is None for t in facts) or not is_static(tensor_of(weight).shape) or not isinstance(group_size, int):
        return None
    return Int4Product(node, x, weight, None, scales=scales, group_size=group_size)


def _key(program: Program, member: Product) -> Any:
    """What members must have in common."""
    assert isinstance(member, Int4Product)
    return member.x, member.group_size, tensor_of(member.scales).dtype, tensor_of(member.weight).dtype


def _linear(x: Any, weight: Any, scales: Any, group_size: int = 32) -> Any:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, scales)


def _two(x: Any, w: Any, s: Any, v: Any, t: Any) -> Any:
    return _linear(x, w, s).sum(-1) * _linear(x, v, t).sum(-1)


def _of(*outs: int, dtype: str = "bf16") -> list[str]:
    """For examples: packed weights of 32 columns and these many rows, each with its scales and zeros."""
    return [spec for out in outs for spec in (f"u8[{out}, 16]", f"{dtype}[1, {out}, 2]")]


ATEN: dict[str, Any] = {"dialects": ("aten",), "prepare": others_are_weights}
FROZEN: dict[str, Any] = {**ATEN, "options": {"freeze": True}}


class ConcatLinearWoqInt4(Rule):
    """int4_mm(x, w, s), int4_mm(x, v, t) -> split(int4_mm(x, cat([w, v]), cat([s, t], 1)), 1), for frozen w, s, v, t

    The results have the same bits, because all weights but the last have a multiple of 64 rows, which is a whole number
    of packed blocks on every CPU. A weight with another number of rows is put last; a second such weight is left out.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        nodes = program.graph.find_nodes(op="call_function", target=INT4_MM)
        for run in runs_with_one_key(program, _read, _key, nodes):
            if len(run.members) < 2:
                problem = Refusal("the input or a weight is written between the layers", at=run.disturbed_by)
                yield from (Match.at(program, m.node, problem=problem) for m in run.members)
                continue
            broken = [m for m in run.members if isinstance(m, Int4Product) and not m.has_whole_blocks]
            members = [m for m in run.members if m not in broken[1:]]
            for member in broken[1:]:
                problem = Refusal(
                    "{found} rows are not a whole number of packed blocks", found=member.out, wanted=BLOCK
                )
                yield Match.at(program, member.node, problem=problem)
            group = placed(members) if len(members) > 1 else None
            if group is not None:
                # a stable sort: the member without whole blocks goes to the end
                group = replace(group, members=tuple(sorted(group.members, key=lambda m: m in broken)))
                rows = tensor_of(group.members[0].node).shape[0]
                yield group.site(program, copied=copied_pieces(program, group, [rows, sum(group.sizes)], 1))
            elif len(members) > 1:
                problem = Refusal("a result is used before the weights of the next layer are computed")
                yield Match.at(program, members[0].node, problem=problem)

    def check(self, m, group, copied):
        constants = [*group.weights, *(member.scales for member in group.members)]
        changing = next((n for n in constants if not m.program.computed_once(n)), None)
        m.require(changing is None, "{at} is not frozen: it would be copied on every call", at=changing)
        copies = pieces_cost(device_model(m.root.device), m.program, group, copied)
        # each block is computed as before, in fewer calls
        before, after = _seconds(group.members, group.sizes), _seconds(group.members, [sum(group.sizes)])
        require_quicker(m, before, after + copies, _site(group, copied), error=math.inf, sure=not copies)

    def rewrite(self, op, group, copied):
        first = group.members[0]
        weight = op.cat(group.weights, dim=0)
        scales = op.cat([member.scales for member in group.members], dim=1)
        whole = op.call(INT4_MM, first.x, weight, first.group_size, scales)
        return take_pieces(op, whole, group, 1, copied)

    examples = [
        fires(_two, "bf16[4, 32]", *_of(64, 64), **FROZEN),
        fires(_two, "f32[4, 32]", *_of(64, 128, dtype="f32"), **FROZEN),
        fires(_two, "bf16[4, 32]", *_of(128, 48), **FROZEN),
        fires(_two, "bf16[4, 32]", *_of(48, 128), **FROZEN),
        fires(lambda x, w, s, v, t, u, r: _two(x, w, s, v, t) + _linear(x, u, r).sum(-1), "bf16[4, 32]",
              *_of(16, 64, 64), **FROZEN),
        # the activation has another user between the two
        fires(lambda x, w, s, v, t: (_linear(x, w, s).sum(), x.exp(), _linear(x, v, t).sum()), "bf16[4, 32]",
              *_of(64, 64), **FROZEN),
        fires(_two, "bf16[0, 32]", *_of(64, 64), **FROZEN),
        declines(_two, "bf16[4, 32]", *_of(64, 64), because="not frozen", **ATEN),
        declines(lambda x, w, s, v, t: (r := t * x[0, 0], _linear(x, w, s).sum() + _linear(x, v, r).sum())[1],
                 "bf16[4, 32]", *_of(64, 64), because="not frozen", **FROZEN),
        declines(_two, "bf16[4, 32]", *_of(48, 48), because="not a whole number of packed blocks", **FROZEN),
        declines(lambda x, w, s, v, t: _linear(x, w, s).sum() + _linear(x, v, t, 64).sum(), "bf16[4, 64]",
                 "u8[64, 32]", "bf16[2, 64, 2]", "u8[64, 32]", "bf16[1, 64, 2]", **FROZEN),
        declines(lambda x, w, s, v, t: _linear(x, w, s).sum() + _linear(x.float(), v, t).sum(), "bf16[4, 32]",
                 "u8[64, 16]", "bf16[1, 64, 2]", "u8[64, 16]", "f32[1, 64, 2]", **FROZEN),
        declines(lambda x, w, s, v, t: (_linear(x, w, s), _linear(x, v, t)), "bf16[512, 32]", *_of(64, 64),
                 because="would cost", **FROZEN),
        declines(lambda x, w, s, v, t: _linear(x, v, t * _linear(x, w, s).sum()), "bf16[4, 32]", *_of(64, 64),
                 because="used before", **FROZEN),
        declines(lambda x, w, s, v, t: (_linear(x, w, s).sum(), x[0].add_(1), _linear(x, v, t).sum())[::2],
                 "bf16[4, 32]", *_of(64, 64), **FROZEN),
    ]  # fmt: skip


def _site(group: ProductGroup, copied: Sequence[bool]) -> JoinedOnCpu:
    """The products with their weights and scales, to be timed."""
    first = group.members[0]
    assert isinstance(first, Int4Product)
    group_size = first.group_size

    def multiply(x: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        weight, scales = operands
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, scales)

    weights = Operand.of([tensor_of(n) for n in group.weights], dim=0)
    scales = Operand.of([tensor_of(m.scales) for m in group.members if isinstance(m, Int4Product)], dim=1)
    return JoinedOnCpu.of(f"int4 products in groups of {group_size}", multiply, group, [weights, scales], copied, True)


def _seconds(members: Sequence[Product], outs: Iterable[int]) -> float:
    """Seconds for products with packed weights of these many rows, one after the other."""
    x = tensor_of(members[0].x)
    model = device_model(x.device)
    rows, inner = (size_hint(size) for size in x.shape)
    arithmetic, read = 2.0 * rows * inner / model.flops(x.dtype), inner / 2 / model.bandwidth
    return sum(model.launch + out * max(arithmetic, read) for out in outs)


@dataclass(frozen=True)
class ConcatLinearWoqInt4Pass(Pass):
    """On a CPU, int4 weight-only linears that share an activation become one, with their packed weights, scales and
    zeros concatenated once."""

    name = "concat_linear_woq_int4"

    def rules(self) -> Sequence[Rule]:
        return (ConcatLinearWoqInt4(),)
