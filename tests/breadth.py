"""Tests that show the same thing on many programs: `make test` runs one in so many of their cases, `make test-all` all.

The rest are marked slow. Cases that must always run have a test of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

ONE_IN = {
    "kernels/test_constants.py::test_constants_in_training": 3,
    "kernels/test_rule_examples.py::test_example_through_kernels": 12,
    "test_attention.py::test_bfloat16": 3,
    "test_attention.py::test_float32": 2,
    "test_attention.py::test_inference": 3,
    "test_attention.py::test_symbolic_sizes": 3,
    "test_attention_aten.py::test_idioms": 2,
    "test_attention_autocast.py::test_bias_in_float32": 2,
    "test_attention_cost.py::test_without_a_kernel_on_a_cpu_products_stay": 3,
    "test_attention_fills.py::test_fills_weigh_what_they_weigh_in_eager": 2,
    "test_attention_masks.py::test_masks_of_models": 3,
    "test_attention_models.py::test_model": 4,
    "test_attention_nan.py::test_compiled": 3,
    "test_attention_padding.py::test_rows_without_keys_have_the_gradients_of_eager": 3,
    "test_auto_chunker.py::test_equal_by_kernels": 4,
    "test_auto_chunker.py::test_equal_to_eager": 3,
    "test_auto_chunker.py::test_equal_to_eager_in_bfloat16": 3,
    "test_auto_chunker.py::test_kernels_keep_the_chunks_apart": 2,
    "test_auto_chunker_dynamic.py::test_as_little_memory_as_with_a_known_number_of_rows": 2,
    "test_auto_chunker_dynamic.py::test_each_pass_is_verified": 2,
    "test_auto_chunker_dynamic.py::test_equal_by_kernels": 6,
    "test_auto_chunker_dynamic.py::test_equal_to_eager_by_one_graph": 4,
    "test_auto_chunker_dynamic.py::test_fewer_sequences_than_chunks": 4,
    "test_batch_gradient_sums.py::test_gradients_are_those_of_eager": 2,
    "test_batching.py::test_gradients_lie_as_their_weights": 3,
    "test_batching.py::test_inductor_makes_the_same_of_it": 2,
    "test_batching.py::test_towers_become_one": 2,
    "test_bisect.py::test_every_rule_and_pass_obeys_the_limit": 6,
    "test_caller_modes.py::test_the_first_import_may_come_at_any_time": 3,
    "test_collectives_fuzz.py::test_results_stay_the_same": 2,
    "test_conv_bn.py::test_the_training_form_has_the_gradients_of_all_weights": 2,
    "test_copy_operands_of_cat.py::test_operands_keep_their_memory": 4,
    "test_cpu_gemms.py::test_projections_become_one_product": 2,
    "test_data_dependent.py::test_sizes_from_data": 2,
    "test_data_dependent.py::test_sizes_from_data_through_kernels": 3,
    "test_data_dependent.py::test_symbols_of_equal_operands_through_kernels": 5,
    "test_decompositions.py::test_batch_norm_keeps_the_memory_format_not_the_strides": 5,
    "test_decompositions.py::test_interpolation_of_lists_is_rounded_once": 4,
    "test_decompositions.py::test_results_have_the_layout_of_the_first_operand": 2,
    "test_decompositions.py::test_what_is_multiplied_by_zero_is_read_where_eager_reads_it": 5,
    "test_every_spelling.py::test_every_spelling_becomes_the_same_graph": 2,
    "test_every_spelling.py::test_other_captures_are_rewritten_alike": 4,
    "test_exported_programs.py::test_the_result_does_what_the_program_did": 2,
    "test_fact_memo.py::test_attention": 2,
    "test_fallbacks_of_kernels.py::test_a_custom_operator_writes_the_view_that_it_is_given": 3,
    "test_flow.py::test_like_eager": 6,
    "test_freeze.py::test_models": 6,
    "test_freeze.py::test_random_programs": 2,
    "test_freeze.py::test_what_comes_from_weights_is_computed_once": 2,
    "test_freeze_changes.py::test_a_change_shows_in_the_next_call": 3,
    "test_fuzz_backend.py::test_random_programs": 2,
    "test_gallery.py::test_a_later_pass_equals_eager": 2,
    "test_gallery.py::test_a_pass_before_autograd_equals_eager_in_forward_and_gradient": 3,
    "test_gradient_cuts.py::test_a_denominator_without_gradient_is_no_softmax": 2,
    "test_gradient_strides.py::test_a_program_without_rewrites_has_the_gradients_of_autograd": 3,
    "test_gradient_strides.py::test_strides_are_those_of_eager": 3,
    "test_hooks_that_return.py::test_what_computes_the_same": 2,
    "test_int_mm_mul.py::test_a_quantized_layer": 2,
    "test_joint_rules.py::test_scaled_softmax_of_a_training_step": 3,
    "test_kernel_corrections.py::test_gradients_of_windows_that_reach_beyond_the_input": 3,
    "test_kernel_corrections.py::test_ldexp_has_the_dtype_of_both": 3,
    "test_kernel_corrections.py::test_remainder_of_infinite_and_large_quotients": 2,
    "test_kernel_corrections.py::test_totals_in_bytes_wrap_around": 3,
    "test_kernels.py::test_float32_is_tf32_only_where_allowed": 3,
    "test_known_buffers.py::test_changes_are_noticed": 6,
    "test_known_buffers.py::test_guards_are_not_skipped_while_dicts_of_buffers_are_the_same": 3,
    "test_linear_work.py::test_pre_grad_work_is_linear": 3,
    "test_linear_work.py::test_pre_grad_work_on_captured_graphs_is_linear": 3,
    "test_linears.py::test_against_eager": 2,
    "test_lists_of_sizes.py::test_results": 3,
    "test_lost_errors.py::test_raises_as_in_eager": 3,
    "test_lost_errors.py::test_what_eager_takes_is_computed": 3,
    "test_models.py::test_equal_to_eager": 3,
    "test_narrow_indices.py::test_casts_of_indices": 4,
    "test_narrow_indices.py::test_fills_with_a_symbolic_number": 3,
    "test_natural.py::test_fires_in_the_whole_flow": 4,
    "test_norm_backward.py::test_gradients_are_those_of_eager": 3,
    "test_numbers.py::test_right_passes_pass": 2,
    "test_overwritten_inputs.py::test_the_backward_sees_the_old_value": 3,
    "test_partition.py::test_equal_results_that_are_both_returned_stay_apart": 3,
    "test_partition.py::test_gradients": 2,
    "test_post_grad_rules.py::test_counts_have_the_dtype_asked_for": 2,
    "test_products_by_onednn.py::test_settings": 2,
    "test_random_statistics.py::test_fallback_random_is_eagers_stream": 3,
    "test_random_statistics.py::test_forward_and_backward_see_the_same_draws": 2,
    "test_realized.py::test_a_mask_is_computed_once_for_all_layers": 2,
    "test_recompute_between_products.py::test_kernels": 2,
    "test_refusals.py::test_why_not_says_fires_where_the_driver_rewrites": 3,
    "test_regions.py::test_values_and_gradients": 3,
    "test_reinplace.py::test_a_cache_is_written_and_not_copied": 2,
    "test_reinplace.py::test_each_step_is_verified": 4,
    "test_reinplace.py::test_sizes_that_are_symbols": 2,
    "test_reinplace.py::test_the_caller_sees_what_eager_does": 4,
    "test_reinplace.py::test_training": 3,
    "test_relu_nan_to_num.py::test_all_arguments_on_all_values": 2,
    "test_slice_scatter_chunking.py::test_equal_to_eager": 2,
    "test_symbolic_arguments.py::test_floats": 8,
    "test_symbolic_arguments.py::test_number_as_input": 10,
    "test_symbolic_arguments.py::test_symbolic_from_the_first_call": 5,
    "test_symbolic_arguments.py::test_through_kernels": 9,
    "test_symbolic_arguments.py::test_without_verification": 4,
    "test_traced_graphs.py::test_make_fx": 4,
    "test_values.py::test_folding_random_programs": 3,
    "test_values.py::test_patterns_of_random_programs": 3,
    "test_whole_graph_passes.py::test_aten_programs_keep_their_meaning": 2,
    "test_whole_graph_passes.py::test_time_is_linear": 4,
    "test_whole_graph_passes.py::test_torch_level_programs_keep_their_meaning": 2,
}


def mark_breadth(items: Iterable[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        several = ONE_IN.get(name)
        if several is None or item.get_closest_marker("slow"):
            continue
        if seen[name] % several:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
