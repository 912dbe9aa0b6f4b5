"""The kind of change that each pass makes, in one table.

A report counts changes that matter separately from changes of spelling and order. A rule whose effect differs from that
of the rest of its pass has its own row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..pipeline import STAGES, Hook
from .record import PassRecord


@dataclass(frozen=True)
class Effect:
    """A kind of change, and how a summary counts changes of this kind."""

    name: str
    one: str
    many: str
    matters: bool = True
    """The program does less work, or different work, afterwards."""
    members: str = ""
    """For a rewrite that joins several similar operations into one: what these are, so that they can be counted."""

    def phrase(self, times: int, sizes: Sequence[int] = ()) -> str:
        """How often, in words; `sizes`: how many operations each rewrite joined."""
        if not self.members or len(sizes) != times:
            return f"{times} {self.one if times == 1 else self.many}"
        if len(set(sizes)) > 1:
            return f"{sum(sizes)} {self.members} joined into {times}"
        return f"{times}x{sizes[0]} {self.members} joined" if times > 1 else f"{sizes[0]} {self.members} joined"


SPELLING = Effect("spelling", "change of spelling", "changes of spelling", matters=False)
MOVE = Effect("order", "move", "moves", matters=False)
PREPARATION = Effect("preparation", "step for the code generator", "steps for the code generator", matters=False)

ATTENTION = Effect("fusion", "attention fused", "attentions fused")
MASK = Effect("fusion", "attention mask simplified", "attention masks simplified")
LINEARS = Effect("fusion", "group of linears joined", "groups of linears joined", members="linears")
PRODUCTS = Effect("fusion", "group of matrix products joined", "groups of matrix products joined")
BATCH = Effect("fusion", "operation batched", "operations batched")
NORM = Effect("fusion", "batch norm folded into weights", "batch norms folded into weights")
NORM_BACKWARD = Effect("fusion", "backward of a layer norm fused", "backwards of layer norms fused")
SUMS = Effect("fusion", "group of gradient sums joined", "groups of gradient sums joined")
PRODUCT = Effect("fusion", "matrix product rewritten", "matrix products rewritten")
PIECES = Effect("clean-up", "split or concatenation simplified", "splits and concatenations simplified")
VIEWS = Effect("clean-up", "view or cast dropped", "views and casts dropped")
NO_OP = Effect("clean-up", "no-op gone", "no-ops gone")
DEAD = Effect("clean-up", "unused value dropped", "unused values dropped")
ONCE = Effect("clean-up", "value computed once instead of twice", "values computed once instead of twice")
CONSTANT = Effect("constant", "constant folded", "constants folded")
RANDOM = Effect("lowering", "random draw replaced", "random draws replaced")
REDUCTION = Effect("lowering", "reduction rewritten", "reductions rewritten")
IN_PLACE = Effect("memory", "write made in place", "writes made in place")
SAVED = Effect("memory", "saved value changed", "saved values changed")
SPREAD = Effect("memory", "scatter spread over copies", "scatters spread over copies")
CHUNKS = Effect("memory", "loss computed in chunks", "losses computed in chunks")
DEVICE = Effect("memory", "tensor built on the GPU", "tensors built on the GPU")
COLLECTIVES = Effect("communication", "bucket of collectives", "buckets of collectives")
WAITS = Effect("communication", "collective or wait left out", "collectives and waits left out")
UNSHARDED = Effect("memory", "gathered parameter read in place", "gathered parameters read in place")
PIPELINED = Effect("communication", "collective fused with products", "collectives fused with products")
YOURS = Effect("yours", "rewrite of yours", "rewrites of yours")
OTHER = Effect("rewrite", "other rewrite", "other rewrites")

EFFECT_OF_PASS: dict[str, Effect] = {
    # pre_grad
    "normalization_pass_aten": SPELLING,
    "normalize_node_kwargs_pass": SPELLING,
    "remove_identity": NO_OP,
    "remove_noop_pass": NO_OP,
    "relu_nan_to_num": NO_OP,
    "fuse_conv_bn": NORM,
    "efficient_conv_bn_eval": NORM,
    "fuse_attention": SPELLING,  # all its rules but one only prepare an attention for that one
    "simplify_attention_masks": MASK,
    "attention_heads": MASK,
    "use_triton_dot_compress": PRODUCT,
    "use_triton_lce_replace_simple_LCE": PRODUCT,
    "use_triton_lce_replace_normal_LCE": PRODUCT,
    "use_matmul_fuse_lce_replace_first_LCE": PRODUCT,
    "use_matmul_lce_replace_normal_LCE": PRODUCT,
    "apply_gumbel_max_trick": RANDOM,
    "einsum_to_pointwise_pass": PRODUCT,
    "group_batch_fusion_passes": BATCH,
    "sink_cat_after_pointwise": BATCH,
    "fuse_split_linear_add_pass": PRODUCTS,
    "fuse_parallel_linear_pass": LINEARS,
    "remove_reshape_pass": VIEWS,
    "linear_permute_fusion": PRODUCT,
    "permute_linear_fusion": PRODUCT,
    "permute_matmul_fusion": PRODUCT,
    "quant_lift_up": MOVE,
    **dict.fromkeys(
        (
            "fuse_chunk_reshape_concat_pass", "fuse_split_getitem_squeeze_cat", "fuse_chunk_squeeze_cat_pass",
            "merge_concats_pass", "remove_split_ops_pass", "stack_to_unsqueeze_pass",
            "fuse_chunk_reshape_unsqueeze_concat_pass", "remove_split_with_size_one_pass", "merge_splits_pass",
            "merge_stack_tanh_unbind_pass", "merge_getitem_cat_pass", "mutate_cat_pass", "split_cat_to_slices_pass",
            "unbind_cat_to_view_pass", "split_stack_to_cats_pass", "unbind_stack_to_slices_pass", "unbind_stack_pass",
            "move_reshape_out_of_split_stack_pass", "split_cat_pass",
        ),
        PIECES,
    ),
    "stable_topological_sort": MOVE,
    # freeze, joint and partition
    "freeze": CONSTANT,
    "canonicalize_aten_ir_passes": SPELLING,
    "remove_noop_ops": NO_OP,
    "constant_fold_uniform_value": CONSTANT,
    "pass_patterns": VIEWS,
    "auto_chunker": CHUNKS,
    "pad_mm": PRODUCT,
    "replace_random_passes": RANDOM,
    "keep_overwritten": SAVED,
    "recompute_between_products": PRODUCT,
    "compute_masks_again": SAVED,
    # post_grad
    "remove_fsdp2_unsharded_param_graph_input_usage": UNSHARDED,
    "eliminate_dead_code": DEAD,
    "eliminate_common_subexpressions": ONCE,
    "reorder_for_locality": MOVE,
    "grouped_gemm_pass": PRODUCTS,
    "concat_linear_woq_int4": PRODUCTS,
    "remove_assert_ops": NO_OP,
    "fuse_attention_aten_pass": SPELLING,  # except for `fuse_attention_aten`, as in `fuse_attention`
    "slice_scatter_chunking": PIECES,
    "reduced_atomic_contention": SPREAD,
    "fuse_norm_backward": NORM_BACKWARD,
    "batch_gradient_sums": SUMS,
    "normalization_aten_pass": SPELLING,
    "decompose_mm_pass": PRODUCT,
    "unbind_stack_aten_pass": PIECES,
    "split_cat_aten_pass": PIECES,
    "select_cat_aten_pass": PIECES,
    "move_view_after_cat_aten_pass": PIECES,
    "pad_aten_mm_pass": PRODUCT,
    "B2B_GEMM_PASS": PRODUCT,
    "deduplicate_wait_tensors": WAITS,
    "dedup_reduce_scatters": WAITS,
    "micro_pipeline_tp_pass": PIPELINED,
    "fuse_ddp_communication": COLLECTIVES,
    "bucket_all_gather": COLLECTIVES,
    "bucket_reduce_scatter": COLLECTIVES,
    "bucket_all_reduce": COLLECTIVES,
    "overlap_scheduling": MOVE,
    "move_constructors_to_gpu": DEVICE,
    # before_codegen
    "gradient_strides": PREPARATION,
    "draw_into_empty_memory": PREPARATION,
    "region_results": PREPARATION,
    "lift_constants": PREPARATION,
    "cat_in_one_launch": PREPARATION,
    "cast_by_aten": PREPARATION,
    "launch_triton_kernels": PREPARATION,
    "spell_out_complex_numbers": PREPARATION,
    "reinplace": IN_PLACE,
    "products_by_onednn": PRODUCT,
    "copy_operands_of_cat": PREPARATION,
}  # fmt: skip

EFFECT_OF_RULE: dict[str, Effect] = {
    "fuse_attention": ATTENTION,
    "fuse_attention_aten": ATTENTION,
    "wait_for_gradients_at_end": MOVE,
    "stabilize_relu": OTHER,
    "sizes_of_inputs": SPELLING,
    "fix_iota_device": DEVICE,
    "scatter_upon_const_tensor": CONSTANT,
    "mul_softmax_pattern": REDUCTION,
    "div_softmax_pattern": REDUCTION,
    "prepare_softmax": REDUCTION,
    "partial_reduction": REDUCTION,
    "pointless_cumsum_replacement": REDUCTION,
    "splitwithsizes_cat_replace": PIECES,
    "cat_splitwithsizes_replace": PIECES,
    "cat_slice_cat": PIECES,
    "cat_of_cat": PIECES,
    **dict.fromkeys(
        (
            "bmm_to_mm", "binary_folding", "mm_plus_mm", "fused_int_mm_mul", "decompose_mem_bound_mm", "addmm",
            "unfuse_bias_add_to_pointwise",
        ),
        PRODUCT,
    ),
}  # fmt: skip

HOOKS = frozenset(entry.name for entries in STAGES.values() for entry in entries if isinstance(entry, Hook))


def effect_of(pass_name: str, rule: str = "") -> Effect:
    """The kind of change that a rule of a pass makes, or the pass itself."""
    if pass_name in HOOKS:
        return YOURS
    return EFFECT_OF_RULE.get(rule) or EFFECT_OF_PASS.get(pass_name, OTHER)


def sizes_of(effect: Effect, records: Iterable[PassRecord]) -> list[int]:
    """How many operations each rewrite of this kind replaced, as far as sites were recorded."""
    firings = [(record.name, site) for record in records for site in record.sites]
    return [len(site.removed) for name, site in firings if effect_of(name, site.rule) is effect]


def main_effect(record: PassRecord) -> Effect | None:
    """The main effect of one run of a pass: the most frequent kind of change that matters, else of any kind."""
    counts = count_effects([record])
    return max(counts, key=lambda effect: (effect.matters, counts[effect]), default=None)


def count_effects(records: Iterable[PassRecord]) -> Counter[Effect]:
    """How many rewrites there are of each kind."""
    counts: Counter[Effect] = Counter()
    for record in records:
        for rule, times in record.fired.items():
            counts[effect_of(record.name, rule)] += times
    return +counts
