"""`POST_GRAD_FUSIONS`: passes on ATen graphs that run only if they are added, each by its name or all by this one.

The earlier stages already do this work. These passes repeat it for operations that a user's own passes introduce, and
for ATen graphs that did not go through those stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from ..joint.pad_mm import PadMm
from ..pieces.read import SEEING
from ..pieces.rule import PutTogether
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .decompose_mem_bound_mm import DecomposeMemBoundMm

ATEN: dict[str, Any] = {"dialects": ("aten",)}


class UnbindStackAten(PutTogether):
    """cat(unsqueeze(unbind(x, d)[i], e), e) -> x, permute(x), or a part of these"""

    joins = ("cat",)
    taken = frozenset(["unbind"])
    between = frozenset(["unsqueeze"])
    needs = frozenset(["unsqueeze"])

    examples = [
        fires(lambda x: torch.cat([p.unsqueeze(0) for p in x.unbind()]) * 2, "f32[4, 6]", **ATEN),
        fires(lambda x: torch.cat([p.unsqueeze(1) for p in x.unbind()], 1) * 2, "f32[4, 6]", **ATEN),
        fires(lambda x: torch.cat([p.unsqueeze(0) for p in x.unbind()]) * 2, "f32[4, 6]", dynamic=True, **ATEN),
        declines(lambda x: torch.cat([p.exp().unsqueeze(0) for p in x.unbind()]), "f32[4, 6]", **ATEN),
        declines(lambda x: torch.cat(x.unbind()) * 2, "f32[4, 6]", **ATEN),
    ]


class SplitCatAten(PutTogether):
    """cat(split(x, sizes, d), e) -> a view or a copy of x; with other tensors, a cat of fewer operands"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])

    examples = [
        fires(lambda x, y: torch.cat([y, *x.split([2, 1, 3])[1:], y]), "f32[6, 4]", "f32[2, 4]", **ATEN),
        fires(lambda x: torch.cat(x.split(2), 1) * 2, "f32[6, 4]", **ATEN),
        fires(lambda x: torch.cat(x.split(2, -1), -1) + 1, "f32[6, 4]", dynamic=True, **ATEN),
        declines(lambda x: torch.cat([p + 1 for p in x.split(2)]), "f32[6, 4]", **ATEN),
        declines(lambda x, y: (lambda a, b: torch.cat([a, y, b]))(*x.chunk(2)), "f32[4]", "f32[2]",
                 because="side by side", **ATEN),
    ]  # fmt: skip


class SelectCatAten(PutTogether):
    """cat(select(x, d, i), select(x, d, i + 1), ...) -> a view or a copy of x, or a cat of fewer operands"""

    joins = ("cat",)
    taken = frozenset(["select"])
    between = frozenset(["unsqueeze", "reshape"])

    examples = [
        fires(lambda x: torch.cat([x.select(1, i) for i in range(4)], 1) * 2, "f32[6, 4, 3]", **ATEN),
        fires(lambda x: torch.cat([x.select(0, i).unsqueeze(0) for i in (1, 2)]) * 2, "f32[6, 4]", **ATEN),
        declines(lambda x: torch.cat([x.select(0, i) for i in (0, 3, 1)]) * x.select(0, 0).sum(), "f32[6, 4]",
                 because="would have to be copied", **ATEN),
        declines(lambda x, y: torch.cat([x.select(0, 0), y.select(0, 0)]), "f32[6, 4]", "f32[6, 4]", **ATEN),
    ]  # fmt: skip


class MoveViewAfterCatAten(PutTogether):
    """cat(reshape(split(x, sizes, d)[i], shape), e) -> reshape(x, ...)"""

    joins = ("cat",)
    taken = frozenset(["split", "slice"])
    between = SEEING
    needs = frozenset(["reshape"])

    examples = [
        fires(lambda x: torch.cat([p.reshape(2, 12) for p in x.split(2)]) * 2, "f32[4, 12]", **ATEN),
        fires(lambda x: torch.cat([p.reshape(2, 2, 3) for p in x.split(2)], 1) * 2, "f32[4, 6]", **ATEN),
        declines(lambda x: torch.cat(x.split(2)) * 2, "f32[4, 6]", **ATEN),
        declines(lambda x: torch.cat([p.reshape(12).exp() for p in x.split(2)]), "f32[4, 6]", **ATEN),
    ]


@dataclass(frozen=True)
class NormalizationAtenPass(Pass):
    """Writes each ATen operation in one form, as the joint stage does, for operations that later passes introduced."""

    name: ClassVar[str] = "normalization_aten_pass"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return CanonicalizeAtenIrPasses().rules()


@dataclass(frozen=True)
class DecomposeMmPass(Pass):
    """Computes every product whose rows have few elements by pointwise operations, whatever the cost model says."""

    name: ClassVar[str] = "decompose_mm_pass"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (DecomposeMemBoundMm(always=True),)


@dataclass(frozen=True)
class UnbindStackAtenPass(Pass):
    """Replaces a value that is unbound and stacked again by the value itself."""

    name: ClassVar[str] = "unbind_stack_aten_pass"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (UnbindStackAten(),)


@dataclass(frozen=True)
class SplitCatAtenPass(Pass):
    """Simplifies concatenations of the pieces of a split, alone or among other tensors."""

    name: ClassVar[str] = "split_cat_aten_pass"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (SplitCatAten(),)


@dataclass(frozen=True)
class SelectCatAtenPass(Pass):
    """Simplifies concatenations of rows that are selected from one tensor."""

    name: ClassVar[str] = "select_cat_aten_pass"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (SelectCatAten(),)


@dataclass(frozen=True)
class MoveViewAfterCatAtenPass(Pass):
    """Reshapes a whole tensor instead of pieces of it that are reshaped alike and concatenated again."""

    name: ClassVar[str] = "move_view_after_cat_aten_pass"
    default: ClassVar[bool] = False

    def rules(self) -> Sequence[Rule]:
        return (MoveViewAfterCatAten(),)


@dataclass(frozen=True)
class PadAtenMmPass(Pass):
    """Runs `pad_mm` once more, for the products that passes of this stage introduced."""

    name: ClassVar[str] = "pad_aten_mm_pass"
    default: ClassVar[bool] = False
    always: bool = False
    """Pad every product that is not aligned, on every device: for tests."""
    measure: bool = True
    """Time both forms on the device; otherwise the cost model decides."""

    def rules(self) -> Sequence[Rule]:
        return (PadMm(self.always, self.measure),)
