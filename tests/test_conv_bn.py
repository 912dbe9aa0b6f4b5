"""Batch norms in the weights before them: whole models, both ways, with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import triptych
from tests.compare import assert_close, check_inference
from tests.models import build
from triptych.passes.session import watching
from triptych.pre_grad.conv_norm import stirred

aten = torch.ops.aten
X = torch.randn(8, 3, 32, 32)


def names(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def convnet(**how):
    return stirred(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.BatchNorm2d(8),
        nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), nn.BatchNorm2d(4, affine=False), nn.Flatten(),
        nn.Linear(4 * 56 * 56, 6), nn.BatchNorm1d(6), **how,
    )  # fmt: skip


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_with_freeze_nothing_of_the_norms_is_left(codegen):
    model = convnet(trained=True)
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"freeze": True, "codegen": codegen})
    with torch.no_grad(), watching() as sessions:
        assert_close(compiled(X), model(X))
        assert [r.rewrites for r in sessions[0].records if r.name == "fuse_conv_bn"] == [4]
        kinds = {n.split(".")[1] for n in names(sessions[0].graphs["forward"])}
        assert kinds <= {"convolution", "relu", "addmm", "view", "reshape", "permute"}, kinds
        model[1].running_var.mul_(2)
        model[3].weight.mul_(2)
        assert_close(compiled(X), model(X))


def test_without_the_promise_the_norms_stay():
    with torch.no_grad(), watching() as sessions:
        torch.compile(convnet(), backend=triptych.compile_fx, options={"codegen": "eager"})(X)
    (record,) = [r for r in sessions[0].records if r.name == "fuse_conv_bn"]
    assert record.rewrites == 0 and all("promised" in d.reason for d in record.declines) and record.declined == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("statistics", [None, torch.float32])
def test_other_dtypes(dtype, statistics):
    """Folded in float32: no worse than what the norm itself rounds."""
    model = stirred(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(dtype)
    if statistics is not None and dtype != torch.float64:
        model[1].to(statistics)
    x = torch.randn(2, 3, 9, 9)
    exact = copy.deepcopy(model).double()(x.to(dtype).double())
    with torch.no_grad(), watching() as sessions:
        compiled = torch.compile(model, backend=triptych.compile_fx, options={"freeze": True, "codegen": "eager"})
        got = compiled(x.to(dtype))
        want = model(x.to(dtype))
    assert [r.rewrites for r in sessions[0].records if r.name == "fuse_conv_bn"] == [1]
    assert got.dtype == want.dtype
    error, allowed = (got.double() - exact).abs().max(), (want.double() - exact).abs().max()
    assert error <= 2 * allowed + 1e-12, (error, allowed)


def test_autocast():
    model = stirred(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"freeze": True, "codegen": "eager"})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), watching() as sessions:
        got, want = compiled(X), model(X)
    assert [r.rewrites for r in sessions[0].records if r.name == "fuse_conv_bn"] == [1]
    assert got.dtype == want.dtype
    assert_close(got, want)


@pytest.mark.parametrize("capture", ["symbolic_trace", "export"])
def test_graphs_of_modules(capture):
    model = stirred(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    with torch.no_grad(), watching() as sessions:
        if capture == "export":
            gm = torch.export.export(model, (X,)).module()
        else:
            gm = torch.fx.symbolic_trace(model)
        compiled = triptych.compile_fx(gm, [X], options={"codegen": "eager", "freeze": True})
        assert_close(compiled(X), model(X))
    assert [r.rewrites for r in sessions[0].records if r.name == "fuse_conv_bn"] == [1]


def test_a_convolution_used_twice_is_left_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = stirred(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y, self.norm(self.conv(x * 2))

    model = Twice().eval()
    compiled = torch.compile(model, backend=triptych.compile_fx, options={"freeze": True, "codegen": "eager"})
    with torch.no_grad(), watching() as sessions:
        for got, want in zip(compiled(X), model(X)):
            assert_close(got, want)
    (record,) = [r for r in sessions[0].records if r.name == "fuse_conv_bn"]
    assert not record.rewrites and all("used elsewhere" in d.reason for d in record.declines)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_the_training_form_has_the_gradients_of_all_weights(codegen):
    model = convnet(trained=True).double()
    options = {"codegen": codegen, "add_passes": "efficient_conv_bn_eval"}
    compiled = torch.compile(model, backend=triptych.compile_fx, options=options)
    x, seed = X.double().requires_grad_(), torch.randn(8, 6).double()

    def gradients(f):
        return torch.autograd.grad(f(x), [x, *model.parameters()], seed)

    want = gradients(model)
    with watching() as sessions:
        got = gradients(compiled)
    (record,) = [r for r in sessions[0].records if r.name == "efficient_conv_bn_eval"]
    assert record.rewrites >= 3 and len(record.decisions) == record.rewrites
    for name, a, b in zip(["x", *dict(model.named_parameters())], got, want):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def test_the_training_form_is_not_run_unless_asked_for():
    info = {p.name: p for p in triptych.list_passes("pre_grad")}
    assert info["fuse_conv_bn"].default and not info["efficient_conv_bn_eval"].default


def test_models():
    case = build("conv_batchnorm")
    for options in ({"freeze": True}, {"add_passes": "efficient_conv_bn_eval"}):
        check_inference(
            case.model, case.call.args, case.call.kwargs, backend=triptych.compile_fx, dynamic=False,
            options={**options, "codegen": "eager"},
        )  # fmt: skip
