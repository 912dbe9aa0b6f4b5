"""The order of all passes, as data: read it top to bottom.

A comment beside a step says why it must run at that point. A `Hook` is a point at which the user's own passes run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from . import _private
from .errors import UnknownName
from .joint.auto_chunker import AutoChunker
from .joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from .joint.constant_fold_uniform_value import ConstantFoldUniformValue
from .joint.freeze import Freeze
from .joint.keep_overwritten import KeepOverwrittenPass
from .joint.pad_mm import PadMmPass
from .joint.pass_patterns import PassPatterns
from .joint.recompute_between_products import RecomputeBetweenProductsPass
from .joint.remove_noop_ops import RemoveNoopOps
from .joint.replace_random_passes import ReplaceRandomPasses
from .options import ADD_RULES, NAMES, Options
from .post_grad.b2b_gemm_pass import B2bGemmPass
from .post_grad.batch_gradient_sums import BatchGradientSumsPass
from .post_grad.bucket_all_gather import BucketAllGather
from .post_grad.bucket_all_reduce import BucketAllReduce
from .post_grad.bucket_reduce_scatter import BucketReduceScatter
from .post_grad.cast_by_aten import CastByAtenPass
from .post_grad.cat_in_one_launch import CatInOneLaunchPass
from .post_grad.compute_masks_again import ComputeMasksAgainPass
from .post_grad.concat_linear_woq_int4 import ConcatLinearWoqInt4Pass
from .post_grad.copy_operands_of_cat import CopyOperandsOfCatPass
from .post_grad.dedup_reduce_scatters import DedupReduceScatters
from .post_grad.deduplicate_wait_tensors import DeduplicateWaitTensors
from .post_grad.draw_into_empty_memory import DrawIntoEmptyMemoryPass
from .post_grad.eliminate_dead_code import EliminateDeadCode
from .post_grad.fuse_attention_aten_pass import FuseAttentionAtenPass
from .post_grad.fuse_ddp_communication import FuseDdpCommunication
from .post_grad.fuse_norm_backward import FuseNormBackward
from .post_grad.gradient_strides import GradientStrides
from .post_grad.group_batch_fusion_passes import BatchFusionOnAten
from .post_grad.grouped_gemm_pass import GroupedGemmPass
from .post_grad.launch_triton_kernels import LaunchTritonKernels
from .post_grad.lift_constants import LiftConstantsPass
from .post_grad.micro_pipeline_tp_pass import MicroPipelineTpPass
from .post_grad.move_constructors_to_gpu import MoveConstructorsToGpu
from .post_grad.overlap_scheduling import OverlapScheduling
from .post_grad.pass_patterns import PostGradPatterns
from .post_grad.post_grad_fusions import (
    DecomposeMmPass,
    MoveViewAfterCatAtenPass,
    NormalizationAtenPass,
    PadAtenMmPass,
    SelectCatAtenPass,
    SplitCatAtenPass,
    UnbindStackAtenPass,
)
from .post_grad.products_by_onednn import ProductsByOnednnPass
from .post_grad.reduced_atomic_contention import ReducedAtomicContention
from .post_grad.region_results import RegionResultsPass
from .post_grad.reinplace import Reinplace
from .post_grad.remove_assert_ops import RemoveAssertOps
from .post_grad.remove_fsdp2_unsharded_param_graph_input_usage import RemoveFsdp2UnshardedParamGraphInputUsage
from .post_grad.reorder_for_locality import ReorderForLocality
from .post_grad.slice_scatter_chunking import SliceScatterChunking
from .post_grad.spell_out_complex_numbers import SpellOutComplexNumbersPass
from .pre_grad.apply_gumbel_max_trick import ApplyGumbelMaxTrick
from .pre_grad.attention_heads import AttentionHeads
from .pre_grad.efficient_conv_bn_eval import EfficientConvBnEval
from .pre_grad.einsum_to_pointwise_pass import EinsumToPointwisePass
from .pre_grad.fuse_attention import FuseAttention
from .pre_grad.fuse_chunk_reshape_concat_pass import FuseChunkReshapeConcatPass
from .pre_grad.fuse_chunk_reshape_unsqueeze_concat_pass import FuseChunkReshapeUnsqueezeConcatPass
from .pre_grad.fuse_chunk_squeeze_cat_pass import FuseChunkSqueezeCatPass
from .pre_grad.fuse_conv_bn import FuseConvBn
from .pre_grad.fuse_parallel_linear_pass import FuseParallelLinearPass
from .pre_grad.fuse_split_getitem_squeeze_cat import FuseSplitGetitemSqueezeCat
from .pre_grad.fuse_split_linear_add_pass import FuseSplitLinearAddPass
from .pre_grad.group_batch_fusion_passes import GroupBatchFusionPasses
from .pre_grad.lce import (
    UseMatmulFuseLceReplaceFirstLCE,
    UseMatmulLceReplaceNormalLCE,
    UseTritonLceReplaceNormalLCE,
    UseTritonLceReplaceSimpleLCE,
)
from .pre_grad.merge_concats_pass import MergeConcatsPass
from .pre_grad.merge_getitem_cat_pass import MergeGetitemCatPass
from .pre_grad.merge_splits_pass import MergeSplitsPass
from .pre_grad.merge_stack_tanh_unbind_pass import MergeStackTanhUnbindPass
from .pre_grad.move_reshape_out_of_split_stack_pass import MoveReshapeOutOfSplitStackPass
from .pre_grad.mutate_cat_pass import MutateCatPass
from .pre_grad.normalization_pass_aten import NormalizationPassAten
from .pre_grad.normalize_node_kwargs_pass import NormalizeNodeKwargsPass
from .pre_grad.permute_fusions import LinearPermuteFusion, PermuteLinearFusion, PermuteMatmulFusion
from .pre_grad.quant_lift_up import QuantLiftUp
from .pre_grad.relu_nan_to_num import ReluNanToNum
from .pre_grad.remove_identity import RemoveIdentity
from .pre_grad.remove_noop_pass import RemoveNoopPass
from .pre_grad.remove_reshape_pass import RemoveReshapePass
from .pre_grad.remove_split_ops_pass import RemoveSplitOpsPass
from .pre_grad.remove_split_with_size_one_pass import RemoveSplitWithSizeOnePass
from .pre_grad.simplify_attention_masks import SimplifyAttentionMasks
from .pre_grad.sink_cat_after_pointwise import SinkCatAfterPointwise
from .pre_grad.split_cat_pass import SplitCatPass
from .pre_grad.split_cat_to_slices_pass import SplitCatToSlicesPass
from .pre_grad.split_stack_to_cats_pass import SplitStackToCatsPass
from .pre_grad.stack_to_unsqueeze_pass import StackToUnsqueezePass
from .pre_grad.unbind_cat_to_view_pass import UnbindCatToViewPass
from .pre_grad.unbind_stack_pass import UnbindStackPass
from .pre_grad.unbind_stack_to_slices_pass import UnbindStackToSlicesPass
from .pre_grad.use_triton_dot_compress import UseTritonDotCompress
from .rewrite.passes import Pass
from .rules.eliminate_common_subexpressions import EliminateCommonSubexpressions
from .rules.stable_topological_sort import StableTopologicalSort


@dataclass(frozen=True)
class Hook:
    """A point at which the user's own passes or rules run."""

    name: str

    def purpose(self) -> str:
        if self.name == ADD_RULES:
            return "your own rules, if their `stages` name this one"
        return "your own passes, in the order given"


Entry = type[Pass] | Hook

PRE_GRAD_OPTIONAL: list[Entry] = [
    FuseSplitGetitemSqueezeCat,
    UseTritonDotCompress,
    UseTritonLceReplaceSimpleLCE,
    UseTritonLceReplaceNormalLCE,
    UseMatmulFuseLceReplaceFirstLCE,  # before the next, so that several layers over one input become one product
    UseMatmulLceReplaceNormalLCE,
    ApplyGumbelMaxTrick,
]
"""Run only if added by name."""

PRE_GRAD: list[Entry] = [
    Hook("pre_grad_custom_pre_pass"),  # passes written for plain torch.fx see the graph as it was captured
    NormalizationPassAten,  # first: what follows sees one spelling of each operation
    NormalizeNodeKwargsPass,
    RemoveIdentity,  # no-ops by name, before those that have to be proved
    RemoveNoopPass,
    Hook(ADD_RULES),  # before our own rules, which may rewrite the same operations
    ReluNanToNum,
    FuseChunkReshapeConcatPass,
    FuseConvBn,  # after the no-ops between a convolution and its norm are gone
    EfficientConvBnEval,
    FuseAttention,  # before products are batched or merged: it must see each attention whole
    SimplifyAttentionMasks,  # before autograd decomposes attention: the mask decides which kernel is chosen
    AttentionHeads,  # after masks are dropped: no kernel supports a mask and grouped heads
    *PRE_GRAD_OPTIONAL,  # added by name, and so before other passes rewrite the same layers
    EinsumToPointwisePass,  # before batching: it batches pointwise operations
    GroupBatchFusionPasses,
    NormalizeNodeKwargsPass,  # again, for the calls that passes have emitted so far
    SinkCatAfterPointwise,  # before the passes that join pieces: its operands may be pieces
    FuseChunkSqueezeCatPass,
    MergeConcatsPass,
    FuseSplitLinearAddPass,
    RemoveReshapePass,
    FuseParallelLinearPass,
    LinearPermuteFusion,  # these three after it: they write layers as products that it does not fuse
    PermuteLinearFusion,
    PermuteMatmulFusion,
    RemoveSplitOpsPass,
    StackToUnsqueezePass,
    FuseChunkReshapeUnsqueezeConcatPass,
    RemoveSplitWithSizeOnePass,  # the first split/cat pass: each is a special case of one rule
    MergeSplitsPass,
    MergeStackTanhUnbindPass,
    MergeGetitemCatPass,
    MutateCatPass,
    SplitCatToSlicesPass,
    UnbindCatToViewPass,
    SplitStackToCatsPass,
    UnbindStackToSlicesPass,
    UnbindStackPass,
    MoveReshapeOutOfSplitStackPass,
    SplitCatPass,  # last of them: it handles the cases that have no pass of their own
    QuantLiftUp,  # after the passes that change views
    RemoveNoopPass,  # once more, for the no-ops that other passes left behind
    Hook("pre_grad_custom_pass"),
    StableTopologicalSort,  # last: whatever the user's passes did, the graph is in order
]

FREEZE: list[Entry] = [Freeze]
"""Runs with the option `freeze`, in inference: before the joint stage, so that its passes no longer see computations on
weights alone, and again after the joint and the post-grad stage, for such computations that their passes added."""

JOINT: list[Entry] = [
    CanonicalizeAtenIrPasses,  # first: rules then match one order of operands and non-negative dims
    Hook("joint_custom_pre_pass"),
    RemoveNoopOps,
    ConstantFoldUniformValue,
    Hook("joint_custom_pre_pass"),  # again, over the folded graph
    Hook(ADD_RULES),
    PassPatterns,
    AutoChunker,  # after the patterns, which rewrite the loss; before products are padded, as each chunk has its own
    PadMmPass,  # after `bmm_to_mm`, which leaves fewer batched products to pad
    ReplaceRandomPasses,  # after the patterns, which match random operations by torch's names
    Hook("joint_custom_post_pass"),
    StableTopologicalSort,
]

BEFORE_PARTITION: list[Entry] = [
    KeepOverwrittenPass,
    RecomputeBetweenProductsPass,  # last: it looks at what the backward reads
]

AFTER_PARTITION: list[Entry] = [ComputeMasksAgainPass]
"""Run on the forward graph together with its backward graph."""

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

STAGES = {
    "pre_grad": tuple(PRE_GRAD),
    "freeze": tuple(FREEZE),
    "joint": tuple(JOINT),
    "before_partition": tuple(BEFORE_PARTITION),
    "after_partition": tuple(AFTER_PARTITION),
    "post_grad": tuple(POST_GRAD),
    "before_codegen": tuple(BEFORE_CODEGEN),
}
"""In the order of the flow. The three that are public functions too are `pre_grad`, `joint` and `post_grad`."""


def stage_entries(stage: str) -> tuple[Entry, ...]:
    if stage not in STAGES:
        raise UnknownName("stage", stage, STAGES)
    return STAGES[stage]


def steps(stage: str, options: Options) -> list[Entry]:
    """What runs in a stage: the default passes and the added ones, without those that are removed by exact name."""
    return [entry for entry in stage_entries(stage) if _runs(entry, options)]


def _runs(entry: Entry, options: Options) -> bool:
    names = {entry.name, *families_of(entry)}
    if not names.isdisjoint(options.remove_passes):
        return False
    return isinstance(entry, Hook) or entry.default or not names.union(entry.parts).isdisjoint(options.add_passes)


def families_of(entry: Entry) -> list[str]:
    return [name for name, members in FAMILIES.items() if entry in members]


@functools.cache
def pass_names() -> frozenset[str]:
    """What can be added or removed: passes, parts of passes, and families of them."""
    entries = [entry for entries in STAGES.values() for entry in entries]
    names = (name for e in entries for name in (e.name, *(() if isinstance(e, Hook) else e.parts)))
    return frozenset([*FAMILIES, *names])


@functools.cache
def rule_names() -> frozenset[str]:
    """Rules can be removed by name as passes can."""
    return frozenset(
        rule.name
        for entries in STAGES.values()
        for entry in entries
        if not isinstance(entry, Hook)
        for rule in entry().rules()
    )


@functools.cache
def default_rule_names() -> frozenset[str]:
    """Rules that run without being added: naming one of them in `add_passes` changes nothing."""
    passes = [e for entries in STAGES.values() for e in entries if not isinstance(e, Hook) and e.default]
    return frozenset(rule.name for entry in passes for rule in entry().rules())


@functools.cache
def option_defaults() -> dict[str, Any]:
    """Every pass's own options, as `pass_name.option`, with their defaults."""
    return {
        f"{entry.name}.{option}": default
        for entries in STAGES.values()
        for entry in entries
        if not isinstance(entry, Hook)
        for option, default in entry.option_fields().items()
    }


@functools.cache
def required_names() -> frozenset[str]:
    """Passes that cannot be removed, and their rules."""
    passes = [e for entries in STAGES.values() for e in entries if not isinstance(e, Hook) and e.required]
    return frozenset(name for entry in passes for name in (entry.name, *(rule.name for rule in entry().rules())))


@functools.cache
def inductor_settings() -> dict[str, Any]:
    """The settings of Inductor's code generator, with the types that they are declared with."""
    config = _private.inductor_config
    return {name: config.get_type(name) for name in config.get_config_copy()}


NAMES.update(
    {
        "passes": pass_names,
        "rules": rule_names,
        "rules that run": default_rule_names,
        "pass options": option_defaults,
        "required": required_names,
        "Inductor's settings": inductor_settings,
    }
)
