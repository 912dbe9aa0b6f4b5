"""Branches and loops, as operators and in Python, with kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import triptych
from tests.compare import check_inference, check_training
from tests.models import Call


class Branches(nn.Module):
    """Both branches read a parameter, a constant and the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        def positive(x: Tensor) -> Tensor:
            return (x @ self.weight).relu() + torch.tensor(2.0)

        def negative(x: Tensor) -> Tensor:
            return torch.softmax(x @ self.weight.t(), -1) * 3

        return torch.cond(x.sum() > 0, positive, negative, (x,)) * 2


def countdown(x: Tensor) -> Tensor:
    def proceeds(i: Tensor, x: Tensor) -> Tensor:
        return i > 0

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i - 1, x * 0.5 + i

    return while_loop(proceeds, body, (torch.tensor(3), x))[1] + 1


def running(x: Tensor) -> tuple[Tensor, Tensor]:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        after = carry * 0.5 + row
        return after, after.sin()

    return scan(step, x.new_zeros(x.shape[1]), x)


def python_loops(x: Tensor) -> tuple[Tensor, Tensor]:
    state = x.new_zeros(x.shape[1])
    states = []
    for i, row in enumerate(x):
        state = torch.tanh(state + row) if i % 2 else state - row
        states.append(state)
    if x.shape[0] > 3:
        states.reverse()
    return torch.stack(states), torch.cat([s[None] for s in states], 1)


def test_cond() -> None:
    x = torch.randn(3, 4)
    more = [Call((-x.abs(),)), Call((x.abs(),))]
    check_inference(Branches(), (x,), backend=triptych.compile_fx, more=more)
    check_training(Branches(), (x.abs(),), backend=triptych.compile_fx, more=[Call((-x.abs(),))])


@pytest.mark.parametrize("program", [countdown, running, python_loops])
@torch._dynamo.config.patch(capture_scalar_outputs=True)  # Inductor asks for it where it lowers a scan
def test_loops(program) -> None:
    check_inference(program, (torch.randn(4, 3),), backend=triptych.compile_fx)


def test_python_loops_training() -> None:
    check_training(python_loops, (torch.randn(4, 3),), backend=triptych.compile_fx)


def test_branch_on_a_value() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2 + torch.tensor([1.0, 2.0, 3.0])
        if y.sum() > 0:  # breaks the graph
            return y.softmax(-1)
        return y - y.mean()

    x = torch.rand(2, 3)
    check_inference(program, (x,), backend=triptych.compile_fx, more=[Call((x - 9,))])
