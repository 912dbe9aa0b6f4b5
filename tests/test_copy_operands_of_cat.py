"""Operands of a concatenation keep memory of their own, through Inductor's kernels."""

from __future__ import annotations

import pytest
import torch

import triptych


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


def returned_transposed(y, other):
    return torch.cat([y, other], 1), y.t()


def returned_in_part(y, other):
    return torch.stack([y, other]), torch.cat([y, y], 1), y[1:]


PROGRAMS = [written_by_index, written_by_an_operator, written_through_a_view, returned_transposed, returned_in_part]
OPERANDS = {"sum": lambda x, w: (x * w).sum(0), "product": lambda x, w: x[0] @ w}


@pytest.mark.parametrize("make", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_operands_keep_their_memory(program, train, make):
    def function(x, w, other):
        return program(make(x, w), other)

    torch.manual_seed(0)
    inputs = torch.randn(3, 4, 4).requires_grad_(train), torch.randn(4, 4), torch.randn(4, 4)
    if train and program in (written_by_an_operator, written_through_a_view):
        pytest.skip("the operator has no gradient")
    compiled = torch.compile(function, backend=triptych.compile_fx, options={"on_error": "raise"})
    expected, results = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(results, expected)
    assert [r.stride() for r in results] == [e.stride() for e in expected]
    assert len({r.untyped_storage().data_ptr() for r in results}) == len(results)
