"""Operands of a concatenation keep memory of their own, through Inductor's kernels."""

from __future__ import annotations

import pytest
import torch

import triptych
from triptych.post_grad import copy_operands_of_cat


@torch.library.custom_op("triptych_cat_tests::double_", mutates_args={"x"})
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def written_by_index(y, other):
    both = torch.cat([y, other], 1)
    return both, y.index_put_((torch.tensor([0, 2]),), torch.ones(2, 4)).sum()


def written_by_an_operator(y, other):
    both = torch.cat([y, other], 1)
    double_(y)
    return both, y.exp()


def written_through_a_view(y, other):
    both = torch.cat([y, other], 1)
    double_(y[:2])
    return both, y.exp()


def cat_is_written(y, other):
    both = torch.cat([y, other], 1)
    double_(both)
    return both.exp(), y.cos()


def returned_transposed(y, other):
    return torch.cat([y, other], 1), y.t()


def returned_in_part(y, other):
    return torch.stack([y, other]), torch.cat([y, y], 1), y[1:]


PROGRAMS = [written_by_index, written_by_an_operator, written_through_a_view, cat_is_written]
PROGRAMS += [returned_transposed, returned_in_part]
OPERANDS = {"sum": lambda x, w: (x * w).sum(0), "product": lambda x, w: x[0] @ w}


@pytest.mark.parametrize("make", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_operands_keep_their_memory(program, train, make):
    def function(x, w, other):
        return program(make(x, w), other)

    torch.manual_seed(0)
    inputs = torch.randn(3, 4, 4).requires_grad_(train), torch.randn(4, 4), torch.randn(4, 4)
    if train and program in (written_by_an_operator, written_through_a_view, cat_is_written):
        pytest.skip("the operator has no gradient")
    compiled = torch.compile(function, backend=triptych.compile_fx, options={"on_error": "raise"})
    expected, results = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(results, expected)
    assert [r.stride() for r in results] == [e.stride() for e in expected]
    assert len({r.untyped_storage().data_ptr() for r in results}) == len(results)


def test_what_the_backward_reads_is_not_what_the_caller_writes():
    """A view of the product is kept for the backward; the caller writes the concatenation before that runs."""

    def function(x, w, v):
        product = x @ w
        return torch.cat([product, w], 1), product[1:] @ v

    gradients = []
    for one in (function, torch.compile(function, backend=triptych.compile_fx, options={"on_error": "raise"})):
        torch.manual_seed(0)
        x, w, v = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 3, requires_grad=True)
        both, result = one(x, w, v)
        with torch.no_grad():
            both.zero_()
        gradients += torch.autograd.grad(result.sum(), v)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_values_that_only_the_backward_reads_may_share(monkeypatch):
    """The gradient of v reads a view of the product: no result, but returned by the forward."""

    def function(x, w, v):
        product = x @ w
        return torch.cat([product, w], 1).sin().sum() + (product.view(2, 8) @ v).sum()

    def copies():
        inputs = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), torch.randn(8, 3, requires_grad=True)
        seen = triptych.explain(function, *inputs, train=True, options={"on_error": "raise"})
        return sum(record.rewrites for record in seen.runs_of("copy_operands_of_cat"))

    assert copies() == 0
    monkeypatch.setattr(copy_operands_of_cat, "results", lambda graph: graph.output_node().all_input_nodes)
    assert copies() == 1  # the program does have such a view
