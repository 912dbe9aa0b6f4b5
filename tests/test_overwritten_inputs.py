"""An input that requires a gradient is written after the forward: what the backward needs of its old value is saved."""

from __future__ import annotations

import pytest
import torch

import triptych


def masked(x):
    s = x.exp()
    x[x > 0.5] = 0.25
    return s * 2


def a_row(x):
    s = x.tanh() * 2
    x[0] = 0
    return s


def scaled(x):
    s = x.softmax(-1)
    x.mul_(2)
    return s.square()


def of_two(x):
    s = x.softmax(-1)
    y = s.sin()
    x[y > 0.5] = 1
    return s, y.exp()


def run(function, backend=None):
    leaf = torch.linspace(-2, 2, 18).view(3, 6).requires_grad_()
    x = leaf * 1
    results = (torch.compile(function, **backend) if backend else function)(x)
    results = results if isinstance(results, tuple) else (results,)
    total = sum((r * torch.linspace(0, 1, r.numel()).view_as(r)).sum() for r in results) + x.sin().sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return [*(r.detach() for r in results), x.detach(), gradient]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("function", [masked, a_row, scaled, of_two])
def test_the_backward_sees_the_old_value(function, codegen):
    compiled = run(function, {"backend": triptych.compile_fx, "options": {"codegen": codegen}})
    torch.testing.assert_close(compiled, run(function))


def test_what_the_backward_does_not_need_is_not_copied():
    def program(x):
        y = x * 3
        x.add_(1)
        return y

    with triptych.record() as explanation:
        run(program, {"backend": triptych.compile_fx, "options": {"codegen": "eager"}})
        assert not any(r.fired["keep_overwritten"] for r in explanation.passes)
        run(masked, {"backend": triptych.compile_fx, "options": {"codegen": "eager"}})
        assert any(r.fired["keep_overwritten"] for r in explanation.passes)
