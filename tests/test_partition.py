"""What the forward keeps for the backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych import partition


def _permuted(x, w):
    return torch.bmm(torch.relu(x).permute(1, 0, 2), w)


def _as_it_is(x, w):
    y = torch.relu(x)
    return torch.bmm(y, w[:1].expand(y.shape[0], -1, -1)).sum() + (y * y).sum()


def _several(x, w):
    y, z = torch.relu(x), F.leaky_relu(x * 2)
    return torch.bmm(y.permute(1, 0, 2), w) + torch.bmm(z.permute(1, 0, 2), w) + F.hardtanh(y.permute(1, 0, 2)) @ w


def _returned(x, w):
    y = torch.relu(x)
    return y, torch.bmm(y.permute(1, 0, 2), w)


def _input_compared(x, w):
    return torch.bmm(torch.where(x > 0, x, x * x).permute(1, 0, 2), w) + torch.bmm(x.permute(1, 0, 2), w)


PROGRAMS = [_permuted, _as_it_is, _several, _returned, _input_compared]


def _inputs():
    torch.manual_seed(0)
    x, w = torch.randn(6, 3, 4, requires_grad=True), torch.randn(3, 4, 4, requires_grad=True)
    with torch.no_grad():
        x[0, 0, 0], x[1, 1, 1] = 0.0, float("nan")
    return x, w


CASES = [
    *((program, dynamic, "eager") for program in PROGRAMS for dynamic in (False, True)),
    (_permuted, False, "inductor"),
    (_several, True, "inductor"),
]


@pytest.mark.parametrize("program, dynamic, codegen", CASES)
def test_gradients(program, dynamic, codegen):
    torch._dynamo.reset()

    def total(made):
        return sum((t * t).sum() for t in (made if isinstance(made, tuple) else (made,)))

    run = torch.compile(program, backend=triptych.compile_fx, options={"codegen": codegen}, dynamic=dynamic)
    wanted, given = _inputs(), _inputs()
    torch.autograd.backward(total(program(*wanted)))
    torch.autograd.backward(total(run(*given)))
    for one, other in zip(wanted, given, strict=True):
        torch.testing.assert_close(other.grad, one.grad, equal_nan=True)


@pytest.mark.parametrize("program", [_permuted, _as_it_is, _returned, _input_compared])
def test_no_comparison_of_something_kept_is_kept(program):
    torch._dynamo.reset()
    explained = triptych.explain(program, *_inputs(), train=True, options={"codegen": "eager"})
    taken = [n.meta["val"] for n in explained.graphs["backward"].graph.nodes if n.op == "placeholder"]
    assert taken and not any(v.dtype == torch.bool for v in taken if isinstance(v, torch.Tensor))


def test_forward_reads_no_size_in_the_backward():
    # the product of two symbolic sizes is the size of no input but of the gradient that comes in
    def function(x, y):
        return 1 - torch.cartesian_prod(x * 2, y * 2)

    x, y = torch.randn(3, requires_grad=True), torch.randn(4, requires_grad=True)
    run = torch.compile(function, backend=triptych.compile_fx, options={"codegen": "eager"}, dynamic=True)
    weights = torch.randn(12, 2)
    want = torch.autograd.grad((function(x, y) * weights).sum(), (x, y))
    got = torch.autograd.grad((run(x, y) * weights).sum(), (x, y))
    torch.testing.assert_close(got, want)


def _sorted_twice(x):
    return torch.sort(x)[0], torch.sort(x * 1)[0]


def _views_of_sorted(x):
    return torch.sort(x)[0].t(), torch.sort(x * 1)[0][1:]


def _pooled_twice(x):
    return F.max_pool2d(x[None], 2)[0], F.max_pool2d(x[None], 2, return_indices=True)[0]


def test_the_partitioner_merges_equal_values_of_a_convolutional_network(monkeypatch):
    """Its gradients are results of one operator with several results, called twice, but its output is not."""
    answers = []
    ask = partition._returns_like_results
    monkeypatch.setattr(partition, "_returns_like_results", lambda *args: answers.append(ask(*args)) or answers[-1])
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 3))
    torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager"})(torch.randn(1, 1, 8, 8)).sum().backward()
    assert answers == [False]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("program", [_sorted_twice, _views_of_sorted, _pooled_twice])
def test_equal_results_that_are_both_returned_stay_apart(program, codegen):
    x = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": codegen})
    first, second = compiled(x)
    want = program(x)
    with torch.no_grad():
        first.zero_()
    assert torch.equal(second, want[1])
    torch.testing.assert_close(torch.autograd.grad(second.sum(), x), torch.autograd.grad(want[1].sum(), x))
