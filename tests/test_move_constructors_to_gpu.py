"""Constructors on their way to a GPU, on fake CUDA values: where a tensor is built is decided without one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from triptych.ir.facts import fact
from triptych.post_grad.move_constructors_to_gpu import MoveConstructorsToGpu
from triptych.testing import run_pass

aten = torch.ops.aten
GPU = torch.device("cuda:0")
bf16, f32 = torch.bfloat16, torch.float32


def traced(program, dtype=f32):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(program)(torch.empty(8, 8, device=GPU, dtype=dtype))


def to_gpu(x, **how):
    return aten._to_copy.default(x, device=GPU, **how)


def on_cpu(gm):
    return [n for n in gm.graph.nodes if isinstance(fact(n), torch.Tensor) and fact(n).device.type == "cpu"]


MOVED = {
    "copied": lambda x: x + to_gpu(torch.arange(8)),
    "cast_on_the_way": lambda x: x + to_gpu(torch.arange(8), dtype=f32),
    "put": lambda x: x + torch.ops.prims.device_put.default(torch.zeros(8), GPU),
    "computed_from": lambda x: x + to_gpu((torch.arange(8) * 2 + 1).view(2, 4).reshape(8).to(torch.int32)),
    "joined": lambda x: x + to_gpu(torch.arange(8).unsqueeze(0) <= torch.arange(8).unsqueeze(1)),
    "a_number": lambda x: aten.mul.Tensor(x, torch.full((), 2.0)),
    "an_index": lambda x: aten.index.Tensor(x, [torch.arange(4) + 1]),
    "used_twice": lambda x: (lambda i: aten.index.Tensor(x, [i]) + aten.index.Tensor(x, [i + 1]))(
        torch.arange(4)
    ),
    "whole_floats": lambda x: x + to_gpu(torch.arange(8, dtype=f32)),
}


@pytest.mark.parametrize("name", MOVED)
def test_it_is_built_on_the_gpu(name):
    gm = traced(MOVED[name])
    assert on_cpu(gm)
    tally = run_pass(MoveConstructorsToGpu, gm)
    gm.graph.lint()
    assert tally.fired and not tally.declines
    assert not on_cpu(gm), gm.graph
    copies = [n for n in gm.graph.nodes if "device_put" in str(n.target) or n.kwargs.get("device") == "cpu"]
    assert not copies


def _returned(x):
    i = torch.arange(4)
    return aten.index.Tensor(x, [i]), i


def _used_on_the_cpu(x):
    i = torch.arange(4)
    return aten.index.Tensor(x, [i]), i.sum()


def _written(x):
    i = torch.zeros(4, dtype=torch.int64)
    aten.add_.Tensor(i, 1)
    return aten.index.Tensor(x, [i])


LEFT = {
    "returned": (_returned, "returned"),
    "used_on_the_cpu": (_used_on_the_cpu, "uses it on the CPU"),
    "rounded_first": (lambda x: aten.mul.Tensor(x, torch.full((), 2, dtype=torch.int64)), "round"),
    "uneven_steps": (lambda x: x + to_gpu(torch.arange(0, 0.8, 0.1)), "round"),
}


@pytest.mark.parametrize("name", LEFT)
def test_it_stays_where_it_is(name):
    program, reason = LEFT[name]
    gm = traced(program)
    before = gm.code
    tally = run_pass(MoveConstructorsToGpu, gm)
    assert not tally.fired and gm.code == before
    assert any(reason in d.reason for d in tally.declines.values()), tally.declines


def test_written_memory_stays():
    gm = traced(_written)
    assert not run_pass(MoveConstructorsToGpu, gm).fired


def test_pinned_memory_stays():
    gm = traced(lambda x: aten.index.Tensor(x, [torch.arange(4)]))
    node = next(n for n in gm.graph.nodes if n.name == "arange")
    node.kwargs = {**node.kwargs, "pin_memory": True}
    tally = run_pass(MoveConstructorsToGpu, gm)
    assert not tally.fired and "pinned" in next(iter(tally.declines.values())).reason


def test_random_draws_keep_their_stream():
    gm = traced(lambda x: x + to_gpu(torch.rand(8)))
    assert not run_pass(MoveConstructorsToGpu, gm).fired


def test_number_in_another_dtype_is_not_rounded_first():
    """A number from the CPU takes part in full precision; on the GPU it would first become bfloat16."""
    gm = traced(lambda x: aten.mul.Tensor(x, torch.full((), 1.001)), dtype=bf16)
    tally = run_pass(MoveConstructorsToGpu, gm)
    assert not tally.fired and "round" in next(iter(tally.declines.values())).reason
