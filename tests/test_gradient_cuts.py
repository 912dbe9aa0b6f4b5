"""`detach` is harmless on the maximum that a softmax subtracts, and on nothing else in it.

Without the gradient of its denominator the quotient is no softmax. Where no gradient is wanted, it is one.
"""

from __future__ import annotations

import pytest
import torch

import triptych
from triptych.passes.session import watching
from triptych.testing.check import compare


def exp_of(scores):
    return (scores - scores.amax(-1, True)).exp()


def sum_of(e):
    return e.sum(-1, True).detach()


def with_sum(q, k, v):
    e = exp_of(q @ k.mT)
    return (e / sum_of(e)) @ v


def with_sum_of_bare_product(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e / e.sum(-1).detach()[..., None]) @ v


def with_reciprocal(q, k, v):
    e = exp_of(q @ k.mT)
    return (e * (1 / sum_of(e))) @ v


def with_power(q, k, v):
    e = exp_of(q @ k.mT)
    return (e * sum_of(e) ** -1) @ v


def with_late_division(q, k, v):
    e = exp_of(q @ k.mT)
    return (e @ v) / sum_of(e)


def with_logsumexp(q, k, v):
    s = q @ k.mT
    return (s - s.logsumexp(-1, True).detach()).exp() @ v


def with_logsumexp_unsqueezed(q, k, v):
    s = q @ k.mT
    return (s - s.logsumexp(-1).unsqueeze(-1).detach()).exp() @ v


def off_by_one(q, k, v):
    e = (q @ k.mT * 0.3).exp()
    return (e / (1 + sum_of(e))) @ v


def off_by_one_shifted(q, k, v):
    s = q @ k.mT * 0.3
    m = s.amax(-1, True).clamp(min=0)
    e = (s - m).exp()
    return (e / ((-m).exp() + sum_of(e))) @ v


def renormalised_product(q, k, v):
    p = (q @ k.mT).softmax(-1) * torch.ones(6, 6).tril()
    return (p / sum_of(p)) @ v


def renormalised_fill(q, k, v):
    p = (q @ k.mT).softmax(-1).masked_fill(torch.ones(6, 6).tril() == 0, 0)
    return (p / sum_of(p)) @ v


def renormalised_triangle(q, k, v):
    p = (q @ k.mT).softmax(-1).tril()
    return (p / sum_of(p)) @ v


def sum_without_gradient(q, k, v):
    e = exp_of(q @ k.mT)
    with torch.no_grad():
        total = e.sum(-1, True)
    return (e / total) @ v


CUT = [
    with_sum, with_sum_of_bare_product, with_reciprocal, with_power, with_late_division, with_logsumexp,
    with_logsumexp_unsqueezed, off_by_one, off_by_one_shifted, renormalised_product, renormalised_fill,
    renormalised_triangle, sum_without_gradient,
]  # fmt: skip


def maximum(q, k, v):
    s = q @ k.mT
    e = (s - s.max(-1, keepdim=True)[0].detach()).exp()
    return (e / e.sum(-1, True)) @ v


def maximum_before_softmax(q, k, v):
    s = q @ k.mT
    return (s - s.amax(-1, True).detach()).softmax(-1) @ v


def maximum_beside_one(q, k, v):
    s = q @ k.mT
    m = s.amax(-1, True).detach()
    e = (s - m).exp()
    return (e / ((-m).exp() + e.sum(-1, True))) @ v


UNCUT = [maximum, maximum_before_softmax, maximum_beside_one]


def check(program, wanted="qkv"):
    """Results and gradients as in eager; how many attentions were fused."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 4, 6, 8, generator=generator) for _ in "qkv"]

    def run(function):
        given = [x.clone().requires_grad_(name in wanted) for name, x in zip("qkv", values)]
        result = function(*given)
        if wanted:
            result.backward(values[0])
        return [result.detach(), *(x.grad for x in given if x.requires_grad)]

    want = run(program)
    with watching() as sessions:
        got = run(torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"}))
    compare(want, got, exact=False)
    return sum(record.fired["fuse_attention"] for session in sessions for record in session.records)


@pytest.mark.parametrize("program", CUT, ids=lambda f: f.__name__)
def test_a_denominator_without_gradient_is_no_softmax(program):
    assert check(program) == 0


@pytest.mark.parametrize("program", CUT, ids=lambda f: f.__name__)
def test_without_gradients_it_is_one(program):
    assert check(program, wanted="") == (program is not sum_without_gradient)


def test_a_gradient_that_does_not_reach_the_scores_is_not_cut():
    assert check(with_sum, wanted="v") == 1


@pytest.mark.parametrize("program", UNCUT, ids=lambda f: f.__name__)
def test_a_maximum_needs_no_gradient(program):
    assert check(program) == 1
