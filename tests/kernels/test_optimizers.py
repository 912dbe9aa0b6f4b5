"""A whole training step, the optimizer's included, as one compiled function."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from tests.compare import Outcome, differences

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
}


def network() -> nn.Module:
    """No bias before the batch norm: its gradient is all rounding, which Adam would scale up to a step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: bool) -> Outcome:
    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if compiled:
        step = torch.compile(step, backend=triptych.compile_fx)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        x = torch.randn(5, 6, generator=generator)
        losses.append(step(x, torch.randint(0, 3, (5,), generator=generator)))
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        state |= {f"{name} of parameter {number}": value for name, value in values.items() if torch.is_tensor(value)}
    return Outcome(None, losses, {f"loss {i}": loss for i, loss in enumerate(losses)}, {}, state)


@pytest.mark.parametrize("name", ["sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "adamw_foreach"))])
def test_training_step(name: str) -> None:
    eager, compiled = network(), network()
    want = train(eager, OPTIMIZERS[name](eager.parameters()), compiled=False)
    got = train(compiled, OPTIMIZERS[name](compiled.parameters()), compiled=True)
    assert len(want.state) == len(got.state)
    assert not differences(want, got)
    assert not copy.deepcopy(want).outputs["loss 0"].equal(want.outputs["loss 2"]), "nothing was learned"


def test_optimizer_step_alone() -> None:
    """`optimizer.step` compiled, the model not: one graph of in-place writes to parameters and their state."""
    outcomes = []
    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2, capturable=False)
        step = torch.compile(optimizer.step, backend=triptych.compile_fx) if compiled else optimizer.step
        for i in range(2):
            torch.manual_seed(i)
            model(torch.randn(5, 6)).square().sum().backward()
            step()
            optimizer.zero_grad()
        outcomes.append(Outcome(None, [], {}, {}, dict(model.state_dict())))
    assert not differences(*outcomes)
