"""Measured times on a GPU: kernels by its own clock, and how long it waits for the host."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import triptych

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.batch = nn.Dropout(0.1), nn.BatchNorm1d(width)

    def forward(self, x):
        return self.batch(x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))))


def check_sums(profile):
    assert profile.device == "cuda"
    assert 0 < profile.kernel_seconds == profile.total_seconds and profile.waiting_seconds >= 0
    assert profile.waiting_seconds == pytest.approx(max(0, profile.wall_seconds - profile.kernel_seconds))
    launched = sum(one.seconds for one in profile.launches)
    assert launched + profile.not_attributed == pytest.approx(profile.kernel_seconds)
    for parts in (profile.regions, profile.modules):
        assert sum(part.seconds for part in parts) == pytest.approx(profile.kernel_seconds)


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(2048, 256, device="cuda")
    next(model.parameters()).grad = torch.full((256,), 3.0, device="cuda")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.cuda.get_rng_state()
    explanation = triptych.explain(model, x, train=True, stock=True, profile=True)
    assert torch.equal(drawn, torch.cuda.get_rng_state())  # here: each test is seeded anew
    return model, state, explanation


def test_the_program_is_as_it_was(step):
    model, state, _ = step
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    gradients = [p.grad for p in model.parameters()]
    assert torch.equal(gradients[0], torch.full((256,), 3.0, device="cuda")) and gradients[1:] == [None] * (len(gradients) - 1)


def test_kernels_are_attributed(step):
    """All but what torch itself launches beside generated code, which in this program is little."""
    explanation = step[2]
    for one in (explanation, explanation.stock):
        check_sums(one.profile)
        assert one.profile.not_attributed < 0.2 * one.profile.kernel_seconds
        generated = [timed for timed in one.profile.launches if timed.launch.generated]
        assert generated and all(timed.seconds > 0 and timed.calls == 1 for timed in generated)
        assert {timed.launch.graph for timed in generated} == {"forward", "backward"}
        modules = {timed.launch.module for timed in one.profile.launches}
        assert {"up", "down"} <= modules


def test_events_are_the_kernels_of_the_gpu(step, tmp_path):
    explanation = step[2]
    trace = json.loads(explanation.to_trace(tmp_path / "step.json").read_text())
    kernels = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert any(event["name"].startswith("triton_") and event["args"].get("module") for event in kernels)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert any(name.startswith("stream ") for name in names)


@pytest.mark.alone
def test_a_step_agrees_with_events(step):
    """A step from an idle GPU to an idle GPU, by the GPU's events, within 2 times."""
    model, _, explanation = step
    torch._dynamo.reset()
    x = torch.randn(2048, 256, device="cuda")
    compiled = torch.compile(model, backend=triptych.compile_fx)
    weights = list(model.parameters())

    def seconds():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        output = compiled(x)
        torch.autograd.grad([output], weights, [torch.ones_like(output)])
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    for _ in range(5):
        seconds()
    best = min(seconds() for _ in range(20))
    assert best / 2 < explanation.profile.wall_seconds < 2 * best


def test_nodes_are_timed_without_code_generation():
    x = torch.randn(512, 256, device="cuda")
    explanation = triptych.explain(Net().cuda(), x, train=True, profile=True, options={"codegen": "eager"})
    check_sums(explanation.profile)
    products = [one for one in explanation.profile.launches if one.launch.cost and one.launch.cost.gemms]
    assert products and all(one.seconds > 0 for one in products)


def test_our_kernels_are_counted_and_timed():
    """A launch of one of our Triton kernels has the products of its operator, and is no unknown."""
    x, weight = torch.randn(64, 512, 32, device="cuda"), torch.randn(512, 16, device="cuda")

    def program(x, weight):
        return torch.ops.triptych.dot_compress(x, weight) + 1

    explanation = triptych.explain(program, x, weight, profile=True)
    ours = [one for one in explanation.profile.launches if "dot_compress_kernel" in one.launch.name]
    assert ours and sum(one.launch.cost.gemms for one in ours) == 2
    assert all(one.launch.cost.bytes > 0 and one.seconds > 0 and one.launch.passes for one in ours)


def test_cuda_graphs():
    """Kernels of a CUDA graph are started together; the generated ones are still known by their names."""
    model, x = Net().cuda().eval(), torch.randn(2048, 256, device="cuda")
    explanation = triptych.explain(model, x, profile=True, mode="reduce-overhead")
    check_sums(explanation.profile)
    generated = [one for one in explanation.profile.launches if one.launch.generated]
    assert generated and all(one.seconds > 0 for one in generated)
