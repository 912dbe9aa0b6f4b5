"""Twice the program is twice the work: passes do not look at the whole graph, or a whole chain, for every node."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.big_graphs import BIG_GRAPHS
from tests.counting import counting_passes, grows
from triptych.stages import joint_graph_passes, post_grad_passes, pre_grad_passes
from triptych.testing.capture import capture_aten, capture_torch

BY_DYNAMO = {
    "autocast_regions": 40, "inside_autocast": 40, "masked_writes": 80, "slice_assignments": 16, "getitems": 16,
    "split_stacked": 16, "split_getitem_cat": 8, "stack_tanh_unbind": 8, "sums_of_layers_over_pieces": 70,
}  # fmt: skip
"""Programs that `symbolic_trace` cannot follow: with regions, assignments to elements, and tuples taken apart."""

ONCE_SQUARE = {
    "views_and_copies": 20, "views_and_copies_in_turn": 20, "sum_of_terms": 80, "in_place_chain": 40, "accumulated": 40,
    "nested_cats": 140, "nested_cats_of_others": 140, "view_chain": 40, "linears_of_one_input": 40,
}  # fmt: skip
"""Programs whose compile time was seen to grow with the square of their size; with a size that shows it."""

LONG = {"views_all_used": 40}
"""Programs with chains that are followed up to a length, which fewer links do not reach."""

SIZES = {**dict.fromkeys(set(BIG_GRAPHS) - set(BY_DYNAMO), 16), **ONCE_SQUARE, **LONG}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_pre_grad_work_is_linear(name):
    def work(n: int) -> Counter[str]:
        program, inputs = BIG_GRAPHS[name](n)
        traced = torch.fx.symbolic_trace(program)
        with counting_passes() as lines:
            pre_grad_passes(traced, inputs)
        return lines

    work(2)  # tables that are read once
    assert not grows(work(SIZES[name]), work(2 * SIZES[name]))


@pytest.mark.parametrize("name", sorted(BY_DYNAMO))
def test_pre_grad_work_on_captured_graphs_is_linear(name):
    def work(n: int) -> Counter[str]:
        traced, inputs = capture_torch(*BIG_GRAPHS[name](n))
        with counting_passes() as lines:
            pre_grad_passes(traced, inputs)
        return lines

    work(2)
    assert not grows(work(BY_DYNAMO[name]), work(2 * BY_DYNAMO[name]))


@pytest.mark.parametrize("name", ["linear_chain", "slice_assignments", "views_all_used", "conv_norms", "cast_chain"])
def test_work_on_aten_graphs_is_linear(name):
    def work(n: int) -> Counter[str]:
        traced, _ = capture_aten(*BIG_GRAPHS[name](n))
        with counting_passes() as lines:
            joint_graph_passes(traced)
            post_grad_passes(traced, True)
        return lines

    work(2)
    assert not grows(work(16), work(32))
