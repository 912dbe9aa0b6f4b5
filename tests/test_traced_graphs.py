"""The three stage functions on graphs of `make_fx` in each tracing mode, and on exported graphs with constants."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych.ir.program import Program
from triptych.testing.check import compare

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

STAGES = {
    "pre_grad": lambda gm, x: triptych.pre_grad_passes(gm, [x]),
    "joint": lambda gm, x: triptych.joint_graph_passes(gm),
    "post_grad": lambda gm, x: triptych.post_grad_passes(gm, is_inference=True) or gm,
}


def writes_through_reshape(x):
    y = x * 2
    z = y.reshape(-1)  # a view: the write below shows in it
    y.add_(1)
    return z.clone() + 1, y


def writes_slice(x):
    y = x.clone()
    y[:, 2:4] = 0
    y[1].mul_(3)
    return y.contiguous() + 1


def changes_shape(x):
    y = x * 1 + 1
    z = y.view(8, 4).clone() * 3
    y.unsqueeze_(0)
    return z, y.view(1, 4, 8) + 1


def gradient(x):
    y = x.detach().requires_grad_()
    out = F.layer_norm(torch.cat(y.split(2, 0), 0) @ y.t(), (4,)).relu().sum()
    return torch.autograd.grad(out, y)[0]


PROGRAMS = {
    "clone": lambda x: x.clone() + 1,
    "linear": lambda x: F.linear(x, torch.ones(8, 8)).relu(),
    "pieces": lambda x: torch.cat(x.split(2, 0), 0) + torch.stack(x.unbind(0)),
    "no-ops": lambda x: (x * 1 + 0).view(4, 8).permute(0, 1) @ x.t().contiguous().to(torch.float32),
    "constants": lambda x: x * torch.ones(4, 8) + torch.zeros(8) + torch.full((4, 1), 2.0),
    "tensor of a number": lambda x: x + torch.tensor(2.0) * torch.tensor([1.0] * 8),
    "attention": lambda x: ((x @ x.t()) / 8**0.5).softmax(-1) @ x,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "casts": lambda x: x.to(torch.float64).to(torch.float32) + x.half().float(),
    "in place": lambda x: x.clone().add_(1).mul_(2),
    "write through a reshape": writes_through_reshape,
    "write of a slice": writes_slice,
    "shape changed in place": changes_shape,
    "size from data": lambda x: x[x > 0].clone() * 1,
    "index": lambda x: x[torch.tensor([0, 2])] + x[:2, None, 0],
    "convolution": lambda x: F.conv1d(x[None], torch.ones(3, 4, 2)).contiguous(),
    "pad": lambda x: F.pad(x, (1, 2)).clone().sum(-1, keepdim=True),
    "gradient": gradient,
}

TRACED = {
    "real": {"tracing_mode": "real"},
    "fake": {"tracing_mode": "fake"},
    "symbolic": {"tracing_mode": "symbolic"},
    "real, decomposed": {"tracing_mode": "real", "decomposition_table": core_aten_decompositions()},
    "real, composites kept": {"tracing_mode": "real", "pre_dispatch": True},
}


def traced(name, how, functional=False):
    program = PROGRAMS[name]
    x = torch.arange(32.0).view(4, 8) - 7
    if how in ("fake", "symbolic") and name == "size from data":
        pytest.skip("a fake tensor has no data")
    if name == "gradient" and (functional or how == "real, composites kept"):
        pytest.skip("autograd.grad cannot be traced so")
    traced_program = torch.func.functionalize(program) if functional else program
    return make_fx(traced_program, **TRACED[how])(x), x


@pytest.mark.parametrize("functional", [False, True], ids=["as written", "functional"])
@pytest.mark.parametrize("how", TRACED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_make_fx(name, how, functional, caplog):
    if functional and how == "real, composites kept":
        pytest.skip("functionalize decomposes")
    original, x = traced(name, how, functional)
    for stage in STAGES.values():
        gm = stage(copy.deepcopy(original), x)
        torch.testing.assert_close(gm(x.clone()), PROGRAMS[name](x.clone()))
    assert not [r for r in caplog.records if r.name.startswith("triptych")]


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "size from data"])
def test_real_tensors_are_rewritten_as_fake_ones(name):
    for stage in STAGES.values():
        operations = []
        for how in ("real", "fake"):
            gm = stage(*traced(name, how))
            operations.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        assert operations[0] == operations[1]


def test_facts_of_one_mode_can_be_computed():
    gm, _ = traced("attention", "real")
    modes = {id(n.meta["val"].fake_mode) for n in gm.graph.nodes if "val" in n.meta}
    assert len(modes) > 1
    program = Program(gm)
    facts = [n.meta["val"] for n in gm.graph.nodes if "val" in n.meta]
    assert all(f.fake_mode is program.fake_mode for f in facts)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert program.compute(node).shape == node.meta["val"].shape


def test_facts_are_those_of_their_time():
    gm, _ = traced("shape changed in place", "real")
    Program(gm)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[:1]
    assert tuple(node.meta["val"].shape) == (4, 8)


def test_views_share_memory_again():
    gm, _ = traced("write through a reshape", "real, composites kept")
    aliasing = Program(gm).aliasing
    nodes = {str(n.target): n for n in gm.graph.nodes}
    view = nodes.get("aten.reshape.default") or nodes["aten.view.default"]
    assert aliasing.same(view, nodes["aten.add_.Tensor"])


class WithConstants(torch.nn.Module):
    def forward(self, x):
        y = x * 1 + torch.tensor(2.0)
        return torch.cat(y.split(2, 0), 0).clone() + torch.tensor([1.0, 2.0, 3.0])[0]


@pytest.mark.parametrize("stage", STAGES)
def test_exported_constants(stage):
    """`torch.export` writes `detach_(lift_fresh_copy(constant))`, which changes no shape and nothing else here."""
    x = torch.randn(4, 8)
    exported = torch.export.export(WithConstants(), (x,)).module()
    assert any("detach_" in str(n.target) for n in exported.graph.nodes)
    gm = STAGES[stage](copy.deepcopy(exported), x)
    left = [str(n.target) for n in gm.graph.nodes]
    assert not any("aten.mul" in t or "clone" in t for t in left)
    if stage == "pre_grad":
        assert not any("cat" in t or "split" in t for t in left)
    compare([exported(x)], [gm(x)])


def detaches_in_place(x):
    y = x * 2
    kept = y * 3
    y.detach_()
    return kept, y * 3 * 1


def test_detach_of_a_value_with_a_gradient_is_left_alone():
    """One fake tensor stands for the value before and after: the gradient that it had does not show."""
    reasons = []

    def look(gm, example_inputs):
        reasons.append(Program(gm).unreadable)
        return gm.forward

    compiled = torch.compile(detaches_in_place, backend=look)
    compiled(torch.randn(3, requires_grad=True))
    assert any(r is not None and "detach_" in r for r in reasons)
