"""`pass_patterns` of the post-grad stage: rewrites for the kernels that will run the forward or the backward.

The joint stage has a pass of the same name with different rules. Removing that name removes both passes; each rule can
also be removed by its own name.
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
from .fused_int_mm_mul import FusedIntMmMul
from .mm_plus_mm import MmPlusMm
from .partial_reduction import PartialReduction
from .pointless_cumsum_replacement import PointlessCumsumReplacement
from .prepare_softmax import PrepareSoftmax
from .split_cat import CatSliceCat, CatSplitwithsizesReplace, SplitwithsizesCatReplace
from .stacked_gradients import StackedGradients


@dataclass(frozen=True)
class PostGradPatterns(Pass):
    """Rewrites of products, sums, reductions and concatenations for the kernels that will run them.

    First come rules that remove or merge operations, then reductions, then rules that choose how the remaining products
    are computed.
    """

    name = "pass_patterns"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = [
    SplitwithsizesCatReplace(), CatSplitwithsizesReplace(), CatSliceCat(), CatOfCat(),
    PointlessCumsumReplacement(), PrepareSoftmax(), BinaryFolding(), MmPlusMm(), FusedIntMmMul(),
    StackedGradients(),
    PartialReduction(),  # finds its own sites, so the rules before it are finished first
    DecomposeMemBoundMm(), Addmm(), UnfuseBiasAddToPointwise(),
]  # fmt: skip
