"""`group_batch_fusion_passes` of the post-grad stage: the batching of stage 1, on the ATen graphs after autograd.

It runs only if the user adds it, whole or in parts: in a captured program, stage 1 has already batched whatever this
pass could batch, and it does not deal with the layouts that a backward graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..batching.plan import Member
from ..batching.recipes import BatchAlongDims, BatchLinear, BatchPointwise, GroupLinear, Recipe
from ..ir.calls import Call
from ..ir.program import Program
from ..pre_grad.group_batch_fusion_passes import BatchRule, kernel_runs
from ..rewrite.examples import Example, declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule

NAME = "group_batch_fusion_passes"
POINTWISE = ("tanh", "sigmoid", "relu", "add", "sub", "mul", "div")
LINEAR, GROUP = "batch_linear_post_grad", "group_linear"
PARTS = (LINEAR, GROUP, *(f"batch_aten_{op}" for op in POINTWISE))


def asked_for(program: Program) -> set[str]:
    """The parts that the user wants: those added by name, or all of them."""
    options = program.options
    named = set(PARTS).intersection(options.add_passes)
    whole = NAME in options.add_passes or not named
    return (set(PARTS) if whole else named).difference(options.remove_passes)


@dataclass(frozen=True)
class AtenLinear(BatchLinear):
    """addmm(b_i, x_i, W_i^T) -> baddbmm(b, x, W^T) over the stack; of one x -> addmm(cat(b), x, cat(W)^T)"""

    def name(self, call: Call) -> str:
        return LINEAR


@dataclass(frozen=True)
class AtenPointwise(BatchPointwise):
    """f(x_i, y_i) -> f(x, y) over the stack, for some f; bit for bit"""

    ops: frozenset[str] = frozenset()

    def name(self, call: Call) -> str:
        return f"batch_aten_{call.op}"

    def member(self, program: Program, node: Node, call: Call) -> Member | None:
        return super().member(program, node, call) if call.op in self.ops else None


@dataclass(frozen=True)
class BatchAten(BatchRule):
    """addmm(b_0, x_0, W_0^T), addmm(b_1, x_1, W_1^T), ... -> baddbmm of the stacks, then tanh, sigmoid, relu, add,
    sub, mul and div of the stacked result; up to rounding"""

    def counts_as(self, name: str) -> bool:
        return name in PARTS and name != GROUP or name == self.name

    def recipes(self, program: Program) -> Sequence[Recipe]:
        wanted = asked_for(program)
        pointwise = AtenPointwise(ops=frozenset(op for op in POINTWISE if f"batch_aten_{op}" in wanted))
        linear = (AtenLinear(),) if LINEAR in wanted else ()
        return (*linear, pointwise, BatchAlongDims())


@dataclass(frozen=True)
class GroupAtenLinears(BatchRule):
    """addmm(b_0, x_0, W_0^T), addmm(b_1, x_1, W_1^T), ... of different sizes -> all in one launch; up to rounding"""

    def counts_as(self, name: str) -> bool:
        return name in (self.name, GROUP)

    def recipes(self, program: Program) -> Sequence[Recipe]:
        runs = GROUP in asked_for(program) and (self.always or kernel_runs(program))
        return (GroupLinear(),) if runs else ()


@dataclass(frozen=True)
class BatchFusionOnAten(Pass):
    """Batches many small operations of one kind in ATen graphs, as in stage 1; added whole, or each kind by name."""

    name: ClassVar[str] = NAME
    default: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = PARTS
    min_group: int = 4
    """Groups of fewer operations than this stay as they are."""

    def rules(self) -> Sequence[Rule]:
        return (BatchAten(self.min_group), GroupAtenLinears(self.min_group))


# ---- examples ----


def _linears(*values: Any) -> Any:
    """Eight linears, each with a different input and weight."""
    return torch.cat([F.linear(x, w) for x, w in zip(values[:8], values[8:16])])


def _towers(x: Any, *weights: Any) -> Any:
    """linear - relu - linear - sigmoid, eight times, the second linear with the first's weight."""
    hidden = [torch.relu(F.linear(x, w, b)) for w, b in zip(weights[:8], weights[8:])]
    return torch.cat([torch.sigmoid(F.linear(h, w)) * h for h, w in zip(hidden, weights[:8])])


def _of_any_sizes(*values: Any) -> Any:
    half = len(values) // 2
    return [F.linear(x, w).relu() for x, w in zip(values[:half], values[half:])]


X, W, B = ("f32[4, 16]",) * 8, ("f32[16, 16]",) * 8, ("f32[16]",) * 8
SIZES = (*("f32[4, 16]", "f32[8, 2]", "f32[6, 5]") * 2, *("f32[3, 16]", "f32[1, 2]", "f32[7, 5]") * 2)
ATEN: dict[str, Any] = {"dialects": ("aten",)}


def _alone(op: str, program: Any) -> Example:
    """An example of the part for one pointwise operation."""
    return fires(program, *X * 2, options={"add_passes": f"batch_aten_{op}"}, **ATEN)


BatchAten.examples = [
    fires(_towers, X[0], *W, *B, **ATEN),
    fires(_towers, X[0], *W, *B, dynamic=True, **ATEN),
    fires(_linears, *X, *W, **ATEN),
    fires(_linears, *["bf16[4, 16]"] * 8, *["bf16[16, 16]"] * 8, **ATEN),
    fires(_towers, X[0], *W, *B, options={"add_passes": "batch_linear_post_grad,batch_aten_relu"}, **ATEN),
    fires(lambda *v: torch.cat([x.tanh() for x in v]), *X * 4, settings={"min_group": 32}, **ATEN),
    declines(_towers, X[0], *W, *B, options={"remove_passes": list(PARTS)}, **ATEN),
    declines(lambda *v: torch.cat([x.exp() for x in v]), *X * 4, settings={"min_group": 32}, **ATEN),
    declines(lambda *v: torch.cat([torch.addmm(b, x, w.t(), beta=2) for x, w, b in zip(v, v[8:], v[16:])]),
             *X, *W, *B, **ATEN),
    declines(_linears, *["f32[2048, 16]"] * 8, *W, because="would cost", **ATEN),
    declines(_of_any_sizes, *SIZES, **ATEN),
]  # fmt: skip
BatchFusionOnAten.part_examples = {
    LINEAR: fires(_linears, *X, *W, options={"add_passes": LINEAR}, **ATEN),
    GROUP: fires(_of_any_sizes, *SIZES, settings={"always": True}, options={"add_passes": GROUP}, **ATEN),
    "batch_aten_tanh": _alone("tanh", lambda *v: torch.cat([x.tanh() for x in v])),
    "batch_aten_sigmoid": _alone("sigmoid", lambda *v: torch.cat([x.sigmoid() for x in v])),
    "batch_aten_relu": _alone("relu", lambda *v: torch.cat([x.relu() for x in v])),
    "batch_aten_add": _alone("add", lambda *v: torch.cat([x + y for x, y in zip(v[::2], v[1::2])])),
    "batch_aten_sub": _alone("sub", lambda *v: torch.cat([x - y for x, y in zip(v[::2], v[1::2])])),
    "batch_aten_mul": _alone("mul", lambda *v: torch.cat([x * y for x, y in zip(v[::2], v[1::2])])),
    "batch_aten_div": _alone("div", lambda *v: torch.cat([x / y for x, y in zip(v[::2], v[1::2])])),
}
GroupAtenLinears.examples = [
    fires(_of_any_sizes, *SIZES, settings={"always": True}, **ATEN),
    declines(_of_any_sizes, *SIZES, **ATEN),
    declines(_of_any_sizes, *SIZES, settings={"always": True}, options={"add_passes": "batch_aten_relu"}, **ATEN),
]
