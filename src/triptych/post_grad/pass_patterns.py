"""`pass_patterns` of the post-grad stage: what the forward and the backward alone can say of their kernels.

The joint stage has a step of the same name, with rules of its own: removing the name removes both, and each rule can be
removed by its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pre_grad.merge_concats_pass import CatOfCat
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .addmm import Addmm, UnfuseBiasAddToPointwise
from .binary_folding import BinaryFolding
from .decompose_mem_bound_mm import DecomposeMemBoundMm
from .mm_plus_mm import MmPlusMm
from .partial_reduction import PartialReduction
from .pointless_cumsum_replacement import PointlessCumsumReplacement
from .prepare_softmax import PrepareSoftmax
from .split_cat import CatSliceCat, CatSplitwithsizesReplace, SplitwithsizesCatReplace


@dataclass(frozen=True)
class PostGradPatterns(Pass):
    """Rewrites of products, sums, reductions and concatenations for the kernels that will run them."""

    name = "pass_patterns"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = [
    SplitwithsizesCatReplace(), CatSplitwithsizesReplace(), CatSliceCat(), CatOfCat(),
    PointlessCumsumReplacement(), PrepareSoftmax(),
    BinaryFolding(),  # before what makes other calls of the products
    DecomposeMemBoundMm(), MmPlusMm(),  # before `addmm`, which takes one of the two products
    Addmm(), UnfuseBiasAddToPointwise(),
    PartialReduction(),
]  # fmt: skip
