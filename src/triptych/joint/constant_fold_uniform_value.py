"""Replaces tensors that hold one value by `full`, and drops operations whose result follows from known operands.

`ir/values` knows the contents of values: one number, a pattern of the index, or a range. Integers and booleans fold
freely. Floats fold as IEEE allows: x*0 stays (NaN and infinity give NaN), x+0.0 is dropped only where no element can be
-0.0 (-0.0 + 0.0 is 0.0), and a clamp only where no bound is a zero whose sign could be seen in the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal
from ..ir.operations import with_trait
from ..ir.program import Program
from ..ir.traits import is_reduction, is_view
from ..ir.values.affine import Affine
from ..ir.values.knowledge import as_number, knowledge
from ..ir.values.transfer import TRANSFER
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .known_choices import ChooseBranch, ChooseTruth, CompareWithTruth, WithinBounds
from .known_operands import (
    Absorb,
    Build,
    DecidedOperation,
    NeutralNumber,
    Site,
    WithItself,
    full_like,
    number_of,
    numbers_used_here_alone,
)

bf16 = torch.bfloat16

CONSTRUCTORS = frozenset("full scalar_tensor tensor lift_fresh_copy".split())
"""Operations without tensor operands: they are as cheap as `full`, so they are not folded."""


def _written(x):
    y = torch.zeros(4)
    y.add_(x)
    return y * 2


def _counted_up(x):
    y = torch.zeros(4).abs()
    y.add_(1)
    return x.sin() + y.expand(4)


def _two_views(x):
    y = torch.zeros(2, 8)
    return y + 1, y, y.view(16)


def _is_view(op: str) -> bool:
    return is_view(op) or op == "tensor_getitem"


KNOWN = frozenset(op for op in {*TRANSFER, *with_trait("reduction")} if op not in CONSTRUCTORS and not _is_view(op))
"""Operations whose result may be known to hold one number; `FoldViewToFull` handles the views."""


class FoldToFull(Rule):
    """f(...) -> full(shape, number), where the result is known to hold one number

    Torch itself computes the number, in the tensor's dtype, and only by operations whose rounding is fixed.
    """

    def pattern(self, op):
        return op.call_of(*KNOWN)

    def concerns(self, program: Program, node: Node, call: Call) -> bool:
        return is_reduction(call.op) or knowledge(program).elements(node) is not None

    def check(self, m):
        _require_number(m)

    def rewrite(self, op, m):
        return full_like(op, m, m.bindings["number"])

    examples = [
        fires(lambda x: x + (torch.zeros(4, 8) + 1) * 3, "f32[4, 8]"),
        fires(lambda x: x + torch.ones_like(x).to(bf16) / 3, "f32[4, 8]"),
        fires(lambda x: torch.full((4, 1), 0.1, dtype=bf16).expand(4, 8) * 3 + x, "bf16[4, 8]"),
        fires(lambda x: torch.zeros(0, 8) + 1, "f32[4]"),
        fires(lambda x: torch.scalar_tensor(3.0) * 2 + x, "f32[4]", dialects=("aten",)),
        declines(lambda x: torch.zeros(4, 8), "f32[4]", dialects=("aten",)),
        declines(lambda x: torch.rand(4) + 1, "f32[4]"),
        declines(lambda x: torch.exp(torch.zeros(4)) + x, "f32[4]", dialects=("aten",)),
        declines(_written, "f32[4]", dialects=("torch",)),
        declines(_counted_up, "f32[4]", dialects=("torch",)),
        fires(_two_views, "f32[4]"),
        # comparisons that always hold, or never
        fires(lambda x: x.clamp(0, 7) < 8, "i64[4, 8]"),
        fires(lambda x: x.clamp(0, 7) < 8, "i64[4, 8]", dynamic=True),
        fires(lambda x: (x % 5 == 5, x.bool().long() >= 0), "i32[4, 8]"),
        fires(lambda x: x.sigmoid() > 1.5, "f32[4, 8]"),
        declines(lambda x: x.sigmoid() > -0.5, "f32[4, 8]"),  # not so for NaN
        declines(lambda x: x.clamp(0, 7) < 7, "i64[4, 8]"),
        declines(lambda x: x > -1, "u8[4, 8]"),  # -1 is 255 there
        # a sum over shapes alone is a number
        fires(lambda x: x * torch.arange(8).sum(), "f32[4, 8]"),
    ]


class FoldViewToFull(Rule):
    """view(full(...)) -> full(shape, number), where the view is used and is not expanded

    Operations on the view are folded before it, so most views are unused by then.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of(*filter(_is_view, program.ops())):
            if not node._erased and node.users and knowledge(program).elements(node) is not None:
                yield Match.at(program, node)

    def check(self, m):
        _require_number(m)
        dims = zip(m.root.tensor.shape, m.root.tensor.stride())
        expanded = any(known_equal(stride, 0) and not known_equal(size, 1) for size, stride in dims)
        m.require(not expanded, "the view is expanded, with a stride of 0: a full tensor would take more memory")

    def rewrite(self, op, m):
        return full_like(op, m, m.bindings["number"])

    examples = [
        fires(lambda x: torch.zeros(2, 8).view(16) * x, "f32[16]"),
        declines(_two_views, "f32[4]", because="leaves the graph"),
        declines(lambda x: torch.zeros(8).expand(4, 8) + x, "f32[4, 8]", because="stride"),
        declines(lambda x: x.view(32) + 1, "f32[4, 8]"),
    ]


def _require_number(m: Match) -> None:
    value = number_of(m.program, m.root.node)
    m.applies(value is not None)
    m.bindings["number"] = as_number(value)  # type: ignore[arg-type]
    m.leave_behind(numbers_used_here_alone(m.program, m.root.node))


class FoldToArange(DecidedOperation):
    """cumsum(ones(n)), cat, index, flip, ... -> arange(start, end, step), where the result counts along one dim"""

    ops = frozenset("cumsum diff index index_select gather cat flip repeat".split())
    # operations that read or scan memory: an arange is cheaper. Other operations are fused into their users.

    def decide(self, site: Site) -> Build | None:
        elements = site.knowledge.elements(site.node)
        leaf = elements.only if elements is not None else None
        if not isinstance(leaf, Affine) or type(leaf.start) is not int:
            return None
        dims = [d for d, s in enumerate(leaf.steps) if type(s) is not int or s != 0]
        if len(dims) != 1 or type(step := leaf.steps[dims[0]]) is not int:
            return None
        return lambda op: _counted(op, site.result, leaf.start, step, dims[0])

    examples = [
        fires(lambda x: x + torch.ones(8, dtype=torch.int64).cumsum(0), "f32[4, 8]"),
        fires(lambda x: x + torch.ones_like(x, dtype=torch.int64).cumsum(1), "f32[4, 8]", dynamic=True,
              dialects=("torch",)),
        declines(lambda x: x + torch.arange(8), "f32[4, 8]"),
    ]  # fmt: skip


def _counted(op, result: torch.Tensor, start: int, step: int, dim: int):
    size = result.shape[dim]
    if isinstance(size, int):
        positions = op.arange(start, start + size * step, step, dtype=result.dtype, device=result.device)
    else:
        positions = op.arange(size, dtype=result.dtype, device=result.device)
        positions = positions if step == 1 else op.mul(positions, step)
        positions = positions if start == 0 else op.add(positions, start)
    if result.dim() == 1:
        return positions
    shape = [size if d == dim else 1 for d in range(result.dim())]
    return op.expand(op.reshape(positions, shape), list(result.shape))


@dataclass(frozen=True)
class ConstantFoldUniformValue(Pass):
    """Computes tensors that hold one value at compile time; x*1, x+0, x/1 and x*0 are folded where IEEE allows.

    Torch itself computes the number, in the tensor's dtype, and only by operations whose rounding is fixed.
    """

    name = "constant_fold_uniform_value"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: Sequence[Rule] = (
    WithItself(), NeutralNumber(), Absorb(), ChooseBranch(), ChooseTruth(), WithinBounds(), CompareWithTruth(),
    FoldToArange(), FoldToFull(),
    FoldViewToFull(),  # last: the operations that used the views are folded by then
)  # fmt: skip
