"""The passes of stage 3 in order, and those before code generation. A comment says why a step must run at its point."""

from __future__ import annotations

from ..joint.remove_noop_ops import RemoveNoopOps
from ..options import ADD_RULES
from ..post_grad.b2b_gemm_pass import B2bGemmPass
from ..post_grad.batch_gradient_sums import BatchGradientSumsPass
from ..post_grad.bucket_all_gather import BucketAllGather
from ..post_grad.bucket_all_reduce import BucketAllReduce
from ..post_grad.bucket_reduce_scatter import BucketReduceScatter
from ..post_grad.cast_by_aten import CastByAtenPass
from ..post_grad.cat_in_one_launch import CatInOneLaunchPass
from ..post_grad.concat_linear_woq_int4 import ConcatLinearWoqInt4Pass
from ..post_grad.copy_operands_of_cat import CopyOperandsOfCatPass
from ..post_grad.dedup_reduce_scatters import DedupReduceScatters
from ..post_grad.deduplicate_wait_tensors import DeduplicateWaitTensors
from ..post_grad.draw_into_empty_memory import DrawIntoEmptyMemoryPass
from ..post_grad.eliminate_dead_code import EliminateDeadCode
from ..post_grad.fuse_attention_aten_pass import FuseAttentionAtenPass
from ..post_grad.fuse_ddp_communication import FuseDdpCommunication
from ..post_grad.fuse_norm_backward import FuseNormBackward
from ..post_grad.gradient_strides import GradientStrides
from ..post_grad.group_batch_fusion_passes import BatchFusionOnAten
from ..post_grad.grouped_gemm_pass import GroupedGemmPass
from ..post_grad.launch_triton_kernels import LaunchTritonKernels
from ..post_grad.lift_constants import LiftConstantsPass
from ..post_grad.micro_pipeline_tp_pass import MicroPipelineTpPass
from ..post_grad.move_constructors_to_gpu import MoveConstructorsToGpu
from ..post_grad.overlap_scheduling import OverlapScheduling
from ..post_grad.pass_patterns import PostGradPatterns
from ..post_grad.post_grad_fusions import (
    DecomposeMmPass,
    MoveViewAfterCatAtenPass,
    NormalizationAtenPass,
    PadAtenMmPass,
    SelectCatAtenPass,
    SplitCatAtenPass,
    UnbindStackAtenPass,
)
from ..post_grad.products_by_onednn import ProductsByOnednnPass
from ..post_grad.reduced_atomic_contention import ReducedAtomicContention
from ..post_grad.region_results import RegionResultsPass
from ..post_grad.reinplace import Reinplace
from ..post_grad.remove_assert_ops import RemoveAssertOps
from ..post_grad.remove_fsdp2_unsharded_param_graph_input_usage import RemoveFsdp2UnshardedParamGraphInputUsage
from ..post_grad.reorder_for_locality import ReorderForLocality
from ..post_grad.slice_scatter_chunking import SliceScatterChunking
from ..post_grad.spell_out_complex_numbers import SpellOutComplexNumbersPass
from ..rules.eliminate_common_subexpressions import EliminateCommonSubexpressions
from ..rules.stable_topological_sort import StableTopologicalSort
from .entries import Entry, Hook

POST_GRAD_FUSIONS: list[Entry] = [
    NormalizationAtenPass,  # first: the others then see one form of each operation
    DecomposeMmPass,
    UnbindStackAtenPass,
    SplitCatAtenPass,
    SelectCatAtenPass,
    MoveViewAfterCatAtenPass,
    PadAtenMmPass,
]
"""Run only if added: each by its own name, or all by the name of this list."""

FAMILIES: dict[str, tuple[Entry, ...]] = {
    "POST_GRAD_FUSIONS": (FuseAttentionAtenPass, *POST_GRAD_FUSIONS),  # attention runs earlier than the others
}
"""Names that stand for several passes, where passes are added or removed."""

COMMUNICATION: list[Entry] = [
    BucketAllGather,
    BucketReduceScatter,
    BucketAllReduce,
    OverlapScheduling,  # after the buckets: it decides where they start
]
"""Run only if added by name."""

POST_GRAD: list[Entry] = [
    RemoveFsdp2UnshardedParamGraphInputUsage,  # first: no later pass moves nodes across freed and refilled memory
    EliminateDeadCode,  # before the rest: nothing dead is moved or matched
    ReorderForLocality,
    Hook("post_grad_custom_pre_pass"),
    GroupedGemmPass,  # before batching, which stacks products of different inputs; these share one
    ConcatLinearWoqInt4Pass,
    BatchFusionOnAten,  # has the name of stage 1's pass; only if added, whole or in parts
    RemoveNoopOps,
    Hook(ADD_RULES),
    RemoveAssertOps,
    EliminateCommonSubexpressions,  # before the patterns: one of them needs reductions to share their operand
    FuseAttentionAtenPass,  # if added; before the patterns, which rewrite long softmaxes and small products
    PostGradPatterns,  # has the name of the joint stage's pass, but other rules
    SliceScatterChunking,
    ReducedAtomicContention,
    FuseNormBackward,  # after the patterns, which compute a sum from another sum
    BatchGradientSumsPass,  # after the passes whose sums it finishes
    *POST_GRAD_FUSIONS,
    B2bGemmPass,  # after the patterns, which rewrite products and biases
    DeduplicateWaitTensors,  # before passes that join collectives, if each is waited for once
    DedupReduceScatters,
    MicroPipelineTpPass,  # only if added; before collectives are joined: it fuses each with its product
    FuseDdpCommunication,  # after every pass that changes gradients: it joins those that leave the graph
    Hook("post_grad_custom_post_pass"),
    StableTopologicalSort,
    MoveConstructorsToGpu,  # late: no later pass changes the devices of its users
    *COMMUNICATION,  # last: no pass then moves a node across a collective that they have placed
]

BEFORE_CODEGEN: list[Entry] = [
    GradientStrides,  # after every pass that changes gradients, the user's too; before memory is reused
    DrawIntoEmptyMemoryPass,
    RegionResultsPass,
    LiftConstantsPass,  # after all that folds or moves constants
    CatInOneLaunchPass,
    CastByAtenPass,
    SpellOutComplexNumbersPass,
    LaunchTritonKernels,  # before memory is reused: it allocates the memory that kernels write
    Reinplace,  # nothing may be moved or matched once memory is written in the middle of the graph
    ProductsByOnednnPass,  # after the previous, which knows products by ATen's names, and adds to their memory
    CopyOperandsOfCatPass,  # last: it looks for writes that follow
]
"""What a code generator needs, and what the caller expects of gradients. These passes run on nested graphs too, and
where a graph is compiled without the other passes of stages 2 and 3."""
