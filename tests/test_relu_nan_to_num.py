"""relu beside nan_to_num: every kind of argument and value, and the option that puts nan_to_num after every relu."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from triptych.pre_grad.relu_nan_to_num import ReluNanToNum
from triptych.testing.capture import capture_modules
from triptych.testing.check import compare_gradients, compare_graphs, run_pass

NAN, INF = math.nan, math.inf
VALUES = [NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 6.5e4, 1e-45, -1e-45]
ARGUMENTS = [None, NAN, INF, -INF, 0.0, -0.0, 2.0, -2.0, 1e39]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def by_name(*given):
    return {name: value for name, value in zip(("nan", "posinf", "neginf"), given) if value is not None}


def relu_first(how):
    return lambda x: torch.nan_to_num(torch.relu(x), **how)


def relu_last(how):
    return lambda x: torch.relu(torch.nan_to_num(x, **how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", ["relu", "nan_to_num"])
def test_all_arguments_on_all_values(first, dtype):
    """Lengths for which kernels take one element at a time, several at once, and both."""
    fired = 0
    every = list(itertools.product(ARGUMENTS, ARGUMENTS, [None, -INF, INF, 0.0, -0.0, 1.0]))
    for given in every[:: 5 if dtype == torch.float32 else 17]:
        how = by_name(*given)
        x = torch.tensor(VALUES * 7, dtype=torch.float64).to(dtype).requires_grad_()
        gm, _ = capture_modules(relu_first(how) if first == "relu" else relu_last(how), [x])
        before = copy.deepcopy(gm)
        if not run_pass(ReluNanToNum, gm).fired.total():
            continue
        fired += 1
        for length in (1, 5, len(x)):
            compare_graphs(before, gm, [x.detach()[:length]])
            if first == "nan_to_num":
                compare_gradients(before, gm, [x.detach()[:length]])
    assert fired if first == "nan_to_num" else not fired  # a gradient is wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_operation_where_no_gradient_is_wanted(dtype):
    fired = 0
    for nan, posinf in itertools.product(ARGUMENTS, ARGUMENTS):
        how = by_name(nan, posinf)
        x = torch.tensor(VALUES * 7, dtype=torch.float64).to(dtype)
        gm, _ = capture_modules(relu_first(how), [x])
        before = copy.deepcopy(gm)
        fired += run_pass(ReluNanToNum, gm).fired.total()
        for length in (1, 5, len(x)):
            compare_graphs(before, gm, [x[:length]])
    assert fired


def test_a_model_called_without_gradients_wants_none():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def program(x):
        return torch.nan_to_num(net(x))

    x = torch.full((2, 4), NAN)
    (record,) = [r for r in triptych.explain(program, x, options={"codegen": "eager"}).passes if r.name == "relu_nan_to_num"]
    assert record.fired["nan_to_num_of_relu"] == 1
    (record,) = [r for r in triptych.explain(program, x, train=True, options={"codegen": "eager"}).passes
                 if r.name == "relu_nan_to_num"]  # fmt: skip
    assert not record.fired and "gradient" in record.declines[0].reason


# ---- stabilize_relu ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(F.relu(self.relu(self.first(x)) - 0.1, inplace=True))


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend=triptych.compile_fx, options={"codegen": "eager", **options})


def test_stabilized_nan_is_zero_and_everything_else_is_as_it_was():
    x = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5])
    for program in (lambda x: torch.relu(x), lambda x: x.clone().relu_(), lambda x: nn.ReLU()(x)):
        stable = compiled(program, stabilize_relu=True)(x)
        assert torch.equal(stable, torch.where(x.isnan(), 0.0, x.relu()))
        assert compiled(program)(x).isnan()[0]  # off unless asked for


def test_a_written_input_is_stabilized_too():
    x = torch.tensor([NAN, -1.0, 2.0])
    compiled(lambda x: x.relu_().sum(), stabilize_relu=True)(x)
    assert x.tolist() == [0.0, 0.0, 2.0]


def test_stabilized_training_equals_eager_where_there_is_no_nan():
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    x = torch.randn(5, 8)
    net(x).square().sum().backward()
    stable = compiled(other, stabilize_relu=True)
    stable(x).square().sum().backward()
    for want, got in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(got.grad, want.grad)
    x[0, 0] = NAN
    assert net(x)[0].isnan().all() and not stable(x).isnan().any()


def count(program, **options):
    explanation = triptych.explain(program, torch.ones(4), options={"codegen": "eager", **options})
    nodes = explanation.graphs["pre_grad"].graph.nodes
    return sum(n.target in (torch.nan_to_num, torch.where) for n in nodes)  # where: with the relu before it, made one


@pytest.mark.parametrize(
    "program, wanted",
    [
        (lambda x: torch.relu(x), 1),
        (lambda x: torch.relu(x).nan_to_num(), 1),
        (lambda x: torch.nan_to_num(x).relu(), 1),
        (lambda x: torch.relu(x).nan_to_num(nan=NAN), 1),  # two, made one
        (lambda x: (torch.relu(x) + 1).relu(), 2),
        (lambda x: x + 1, 0),
    ],
)
def test_none_is_doubled(program, wanted):
    assert count(program, stabilize_relu=True) == wanted
