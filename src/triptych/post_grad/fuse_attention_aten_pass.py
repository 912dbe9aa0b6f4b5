"""`fuse_attention_aten_pass`: attention written by hand, in an ATen graph after autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..attention.fuse import AttentionByHand
from ..attention.preparation import ShapeOfScores
from ..attention.rule import InDecomposedGraph
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}


@dataclass(frozen=True)
class FuseAttentionAten(InDecomposedGraph, AttentionByHand):
    """bmm(softmax(scale * bmm(Q, K^T) + bias), V) -> one attention kernel, up to rounding"""

    @classmethod
    def rule_name(cls) -> str:
        return "fuse_attention_aten"

    examples = []


class ShapeOfScoresAten(InDecomposedGraph, ShapeOfScores):
    """sym_size(scores, 3) -> sym_size(key, 2): a size needs no scores"""

    examples = []


@dataclass(frozen=True)
class FuseAttentionAtenPass(Pass):
    """..."""

    name: ClassVar[str] = "fuse_attention_aten_pass"
    default: ClassVar[bool] = False

    lowest_score: float = -1e8

    def rules(self) -> Sequence[Rule]:
        return (ShapeOfScoresAten(), FuseAttentionAten(self.lowest_score),)
