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
    "test_attention.py::test_inference": 3,
    "test_attention.py::test_symbolic_sizes": 3,
    "test_attention_autocast.py::test_bias_in_float32": 2,
    "test_attention_fills.py::test_fills_weigh_what_they_weigh_in_eager": 2,
    "test_attention_masks.py::test_masks_of_models": 3,
    "test_attention_models.py::test_model": 4,
    "test_auto_chunker.py::test_equal_by_kernels": 3,
    "test_auto_chunker.py::test_equal_to_eager": 2,
    "test_auto_chunker.py::test_equal_to_eager_in_bfloat16": 3,
    "test_auto_chunker_dynamic.py::test_equal_by_kernels": 3,
    "test_auto_chunker_dynamic.py::test_equal_to_eager_by_one_graph": 2,
    "test_auto_chunker_dynamic.py::test_fewer_sequences_than_chunks": 2,
    "test_batching.py::test_inductor_makes_the_same_of_it": 2,
    "test_batching.py::test_towers_become_one": 2,
    "test_bisect.py::test_every_rule_and_pass_obeys_the_limit": 6,
    "test_conv_bn.py::test_the_training_form_has_the_gradients_of_all_weights": 2,
    "test_cpu_gemms.py::test_projections_become_one_product": 2,
    "test_data_dependent.py::test_sizes_from_data": 2,
    "test_every_spelling.py::test_every_spelling_becomes_the_same_graph": 2,
    "test_every_spelling.py::test_other_captures_are_rewritten_alike": 2,
    "test_fact_memo.py::test_attention": 2,
    "test_flow.py::test_like_eager": 5,
    "test_freeze.py::test_models": 6,
    "test_freeze.py::test_random_programs": 2,
    "test_freeze.py::test_what_comes_from_weights_is_computed_once": 2,
    "test_freeze_changes.py::test_a_change_shows_in_the_next_call": 2,
    "test_fuzz_backend.py::test_random_programs": 2,
    "test_gallery.py::test_a_pass_before_autograd_equals_eager_in_forward_and_gradient": 3,
    "test_gradient_cuts.py::test_a_denominator_without_gradient_is_no_softmax": 2,
    "test_joint_rules.py::test_scaled_softmax_of_a_training_step": 3,
    "test_kernels.py::test_float32_is_tf32_only_where_allowed": 3,
    "test_known_buffers.py::test_changes_are_noticed": 6,
    "test_linear_work.py::test_pre_grad_work_is_linear": 3,
    "test_linear_work.py::test_pre_grad_work_on_captured_graphs_is_linear": 3,
    "test_linears.py::test_against_eager": 2,
    "test_natural.py::test_fires_in_the_whole_flow": 4,
    "test_numbers.py::test_right_passes_pass": 2,
    "test_partition.py::test_gradients": 2,
    "test_post_grad_rules.py::test_counts_have_the_dtype_asked_for": 2,
    "test_random_statistics.py::test_forward_and_backward_see_the_same_draws": 2,
    "test_refusals.py::test_why_not_says_fires_where_the_driver_rewrites": 3,
    "test_reinplace.py::test_a_cache_is_written_and_not_copied": 2,
    "test_reinplace.py::test_each_step_is_verified": 2,
    "test_reinplace.py::test_sizes_that_are_symbols": 2,
    "test_reinplace.py::test_the_caller_sees_what_eager_does": 2,
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
