"""The three functions on graphs from everywhere: torch._dynamo.export, torch.export, make_fx, symbolic_trace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from triptych.errors import UnknownName
from triptych.ir.text import text
from triptych.testing.check import compare_graphs

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def dynamo_export(program, *inputs):
    gm, _ = torch._dynamo.export(program)(*inputs)
    return gm


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op.startswith("call")]


class TestThreeProgramsWithOnlyTheImportChanged:
    """In PyTorch 2.13 none of the three changes anything, because its passes expect another dialect."""

    def test_convolution(self):
        def program(x):
            return F.conv2d(x, torch.randn(1, 1, 3, 3))

        x = torch.randn(1, 1, 8, 8)
        gm = dynamo_export(program, x)
        before = copy.deepcopy(gm)
        gm = triptych.pre_grad_passes(gm, [x])
        torch.manual_seed(0)
        expected = before(x)
        torch.manual_seed(0)
        assert torch.equal(gm(x), expected)
        again = text(gm)
        assert text(triptych.pre_grad_passes(gm, [x])) == again  # the canonical form is a fixpoint

    @pytest.mark.parametrize("capture", [dynamo_export, lambda f, x: torch.fx.symbolic_trace(f)])
    def test_random_numbers(self, capture):
        def program(x):
            return x + torch.rand_like(x)

        x = torch.zeros(64, 1000)
        gm = triptych.pre_grad_passes(capture(program, x), [x])
        gm = triptych.joint_graph_passes(gm)
        assert not any("rand_like" in t for t in targets(gm)) and any("inductor_random" in t for t in targets(gm))
        torch.manual_seed(3)
        first = gm(x)
        torch.manual_seed(3)
        assert torch.equal(gm(x), first) and not torch.equal(gm(x), first)
        assert 0 <= first.min() and first.max() < 1
        assert abs(first.mean() - 0.5) < 0.01 and abs(first.var() - 1 / 12) < 0.002

    @pytest.mark.parametrize("capture", ["symbolic_trace", "dynamo", "make_fx", "export"])
    def test_clone(self, capture):
        def program(x):
            y = x.clone()
            return y + 1

        x = torch.randn(4, 4)
        gm = {
            "symbolic_trace": lambda: torch.fx.symbolic_trace(program),
            "dynamo": lambda: dynamo_export(program, x),
            "make_fx": lambda: make_fx(program)(x),
            "export": lambda: torch.export.export(_module(program), (x,)).module(),
        }[capture]()
        assert triptych.post_grad_passes(gm, is_inference=False) is None
        assert not any("clone" in t for t in targets(gm))
        assert torch.equal(gm(x), x + 1)


def _module(function):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    return Module()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        a, b = self.linear(x).chunk(2, dim=-1)
        y = torch.cat([a, b], -1).view(x.shape) + x * 1
        return self.norm(y.transpose(0, 1).transpose(0, 1)).contiguous()


@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_programs_through_the_three_functions(dynamic):
    x = torch.randn(4, 8)
    sizes = {"x": {0: torch.export.Dim("n", min=2, max=64)}} if dynamic else None
    gm = torch.export.export(Block(), (x,), dynamic_shapes=sizes).module()
    before = copy.deepcopy(gm)
    nodes = len(gm.graph.nodes)
    gm = triptych.joint_graph_passes(triptych.pre_grad_passes(gm, [x]))
    triptych.post_grad_passes(gm, is_inference=True)
    assert len(gm.graph.nodes) < nodes
    torch.testing.assert_close(gm(x), before(x))
    if dynamic:
        other = torch.randn(7, 8)
        torch.testing.assert_close(gm(other), before(other))


def test_graphs_without_any_facts():
    block = Block()
    gm = torch.fx.symbolic_trace(lambda x: F.relu(x.clone()).reshape(-1) + 0)
    x = torch.randn(4, 8)
    gm = triptych.joint_graph_passes(triptych.pre_grad_passes(gm))
    triptych.post_grad_passes(gm, is_inference=True)
    assert torch.equal(gm(x), F.relu(x).reshape(-1))
    traced = torch.fx.symbolic_trace(block)
    before = copy.deepcopy(traced)
    compare_graphs(before, triptych.pre_grad_passes(traced, [x]), [x])


def test_names_are_checked():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(UnknownName, match="remove_noop_pass"):
        triptych.pre_grad_passes(gm, remove_passes="remove_noop_pas")
    with pytest.raises(UnknownName):
        triptych.pre_grad_passes(gm, add_passes=["nothing_like_it"])
    removed = triptych.pre_grad_passes(torch.fx.symbolic_trace(lambda x: x.clone() + 1), remove_passes="remove_noop_pass")
    assert "clone" in str(targets(removed))


def test_modules_with_parameters_train_alike():
    torch.manual_seed(0)
    block = Block()
    gm = triptych.pre_grad_passes(torch.fx.symbolic_trace(block), [torch.randn(4, 8)])
    x = torch.randn(4, 8)
    block(x).sum().backward()
    want = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    gm(x).sum().backward()
    got = {n: p.grad for n, p in gm.named_parameters()}
    for (name, _), grad in zip(block.named_parameters(), want):
        torch.testing.assert_close(got[name], grad)
