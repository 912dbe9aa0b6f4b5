"""The passes of stage 1 in order. A comment beside a step says why it must run at that point."""

from __future__ import annotations

from ..options import ADD_RULES
from ..pre_grad.apply_gumbel_max_trick import ApplyGumbelMaxTrick
from ..pre_grad.attention_heads import AttentionHeads
from ..pre_grad.efficient_conv_bn_eval import EfficientConvBnEval
from ..pre_grad.einsum_to_pointwise_pass import EinsumToPointwisePass
from ..pre_grad.fuse_attention import FuseAttention
from ..pre_grad.fuse_chunk_reshape_concat_pass import FuseChunkReshapeConcatPass
from ..pre_grad.fuse_chunk_reshape_unsqueeze_concat_pass import FuseChunkReshapeUnsqueezeConcatPass
from ..pre_grad.fuse_chunk_squeeze_cat_pass import FuseChunkSqueezeCatPass
from ..pre_grad.fuse_conv_bn import FuseConvBn
from ..pre_grad.fuse_parallel_linear_pass import FuseParallelLinearPass
from ..pre_grad.fuse_split_getitem_squeeze_cat import FuseSplitGetitemSqueezeCat
from ..pre_grad.fuse_split_linear_add_pass import FuseSplitLinearAddPass
from ..pre_grad.group_batch_fusion_passes import GroupBatchFusionPasses
from ..pre_grad.lce import (
    UseMatmulFuseLceReplaceFirstLCE,
    UseMatmulLceReplaceNormalLCE,
    UseTritonLceReplaceNormalLCE,
    UseTritonLceReplaceSimpleLCE,
)
from ..pre_grad.merge_concats_pass import MergeConcatsPass
from ..pre_grad.merge_getitem_cat_pass import MergeGetitemCatPass
from ..pre_grad.merge_splits_pass import MergeSplitsPass
from ..pre_grad.merge_stack_tanh_unbind_pass import MergeStackTanhUnbindPass
from ..pre_grad.move_reshape_out_of_split_stack_pass import MoveReshapeOutOfSplitStackPass
from ..pre_grad.mutate_cat_pass import MutateCatPass
from ..pre_grad.normalization_pass_aten import NormalizationPassAten
from ..pre_grad.normalize_node_kwargs_pass import NormalizeNodeKwargsPass
from ..pre_grad.permute_fusions import LinearPermuteFusion, PermuteLinearFusion, PermuteMatmulFusion
from ..pre_grad.quant_lift_up import QuantLiftUp
from ..pre_grad.relu_nan_to_num import ReluNanToNum
from ..pre_grad.remove_identity import RemoveIdentity
from ..pre_grad.remove_noop_pass import RemoveNoopPass
from ..pre_grad.remove_reshape_pass import RemoveReshapePass
from ..pre_grad.remove_split_ops_pass import RemoveSplitOpsPass
from ..pre_grad.remove_split_with_size_one_pass import RemoveSplitWithSizeOnePass
from ..pre_grad.simplify_attention_masks import SimplifyAttentionMasks
from ..pre_grad.sink_cat_after_pointwise import SinkCatAfterPointwise
from ..pre_grad.split_cat_pass import SplitCatPass
from ..pre_grad.split_cat_to_slices_pass import SplitCatToSlicesPass
from ..pre_grad.split_stack_to_cats_pass import SplitStackToCatsPass
from ..pre_grad.stack_to_unsqueeze_pass import StackToUnsqueezePass
from ..pre_grad.unbind_cat_to_view_pass import UnbindCatToViewPass
from ..pre_grad.unbind_stack_pass import UnbindStackPass
from ..pre_grad.unbind_stack_to_slices_pass import UnbindStackToSlicesPass
from ..pre_grad.use_triton_dot_compress import UseTritonDotCompress
from ..rules.stable_topological_sort import StableTopologicalSort
from .entries import Entry, Hook

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
