"""What replaying guarantees, on a device that behaves as CUDA graphs do, and when it replays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from tests.replay_guarantees import *  # noqa: F403
from tests.replay_guarantees import WIDTH, Net, compiled, inputs
from tests.replayed import replaying_on_a_cpu


@pytest.fixture(params=["eager", "inductor"])
def codegen(request):
    return request.param


@pytest.fixture
def device(monkeypatch):
    with replaying_on_a_cpu(monkeypatch) as device:
        yield device
    torch._dynamo.reset()


def test_somebody_else_records(device, codegen):
    model = Net()
    run, x = compiled(model, codegen), inputs(1)[0]
    device.somebody_records = True
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(run(x), model(x))
    assert not device.graphs


def test_memory_is_freed_with_the_program(device, codegen):
    model = Net()
    run = compiled(model, codegen)
    for x in inputs(6):
        run(x).sum().backward()
    parameter = weakref.ref(model.first.weight)
    del run, model, x
    torch._dynamo.reset()
    device.graphs.clear()
    gc.collect()
    assert parameter() is None


def test_random_numbers_are_those_without_replays(device):
    def program(x):
        return F.dropout(x, 0.5)

    run, x = compiled(program, "eager"), torch.ones(64)
    for seed in range(6):
        torch.manual_seed(seed)
        mine = [run(x), run(x)]
        torch.manual_seed(seed)
        assert torch.equal(torch.stack(mine), torch.stack([program(x), program(x)]))


def test_a_mode_that_watches_calls_sees_them(device):
    from torch.utils.flop_counter import FlopCounterMode

    model = Net()
    run, x = compiled(model, "eager"), inputs(1)[0]
    with torch.no_grad():
        for _ in range(5):
            run(x)
        with FlopCounterMode(display=False) as counted:
            run(x)
    assert counted.get_total_flops() == 2 * 2 * 4 * WIDTH * 2 * WIDTH


def test_a_graph_that_is_retained(device):
    model, want = Net(), Net()
    want.load_state_dict(model.state_dict())
    run = compiled(model, "eager")
    for x in inputs(6):
        for call in (run, want):
            loss = call(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for mine, theirs in zip(model.parameters(), want.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None
