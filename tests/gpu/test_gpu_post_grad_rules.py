"""The post-grad patterns on a GPU: equal to eager, by the kernels that they are for."""

from __future__ import annotations

import copy

import pytest
import torch

import triptych
from tests.clock import clock_says
from triptych.passes.session import watching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64


def compiled(program, *inputs, **options):
    """What the program gives, compiled, and how often each rule of the stage fired."""
    torch._dynamo.reset()
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, options={"on_error": "raise", "tune": "off", **options})
    with torch.no_grad(), watching() as sessions:
        made = run(*inputs)
    fired = [r.fired for s in sessions for r in s.records if r.stage == "post_grad" and r.name == "pass_patterns"]
    return made, fired[0]


def test_softmax_of_long_rows_in_one_pass():
    """Some rows have infinities, which the kernel alone would count as 1."""
    inf = torch.inf
    x = torch.randn(1024, 131072, device="cuda")
    x[1], x[2, 3], x[3, 2], x[4, :5], x[5, 0] = -inf, inf, torch.nan, -inf, inf
    made, fired = compiled(lambda x: (x.softmax(1), x.log_softmax(1)), x)
    assert fired["prepare_softmax"]
    torch.testing.assert_close(made[0], x.softmax(1), equal_nan=True)
    torch.testing.assert_close(made[1], x.log_softmax(1), equal_nan=True)


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_products_of_few_columns(dtype, monkeypatch):
    clock_says(monkeypatch, (1.0, 0.5))  # whether it pays is no matter here
    a, b = torch.randn(1 << 20, 4, device="cuda", dtype=dtype), torch.randn(4, 4, device="cuda", dtype=dtype)
    options = {"tune": "all", "remove_passes": "pad_mm"}  # which may make more columns
    made, fired = compiled(lambda a, b: (a @ b).relu(), a, b, **options)
    assert fired["decompose_mem_bound_mm"] == 1
    torch.testing.assert_close(made, (a.to(f64) @ b.to(f64)).relu().to(dtype), atol=1e-5, rtol=1.6e-2)


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_sums_of_products(dtype):
    shapes = (4096, 64), (64, 4096), (4096, 64), (64, 4096)
    a, b, c, d = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
    made, fired = compiled(lambda a, b, c, d: a @ b + c @ d, a, b, c, d)
    assert fired["mm_plus_mm"] == 1
    exact = a.to(f64) @ b.to(f64) + c.to(f64) @ d.to(f64)
    assert (made.to(f64) - exact).abs().max() <= 2 * (a @ b + c @ d - exact).abs().max() + 1e-4


@pytest.mark.parametrize("shape", [(4, 1024), (64, 197)])
def test_gradients_that_are_sums_over_rows(shape):
    """The rows of the second shape have no parts of 128 each."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    exact = torch.nn.Sequential(layer, copy.deepcopy(layer)).cuda()
    eager = copy.deepcopy(exact).to(bf16)
    x, weight = torch.randn(2, *shape, 256, device="cuda")
    ours, kernels = copy.deepcopy(eager), {}
    for removed in ([], ["batch_gradient_sums"]):
        torch._dynamo.reset()
        options = {"on_error": "raise", "remove_passes": [*removed, "fuse_norm_backward"]}
        call = torch.compile(ours, backend=triptych.compile_fx, options=options)
        ours.zero_grad()
        with watching() as sessions:
            call(x.to(bf16)).float().mul(weight).mean().backward()
        kernels[not removed] = sessions[0].kernels["backward"].count(".run(")
        for model in (exact, eager):
            model.zero_grad()
            model(x.to(next(model.parameters()).dtype)).float().mul(weight).mean().backward()
        gradients = [[p.grad.to(f32) for p in model.parameters()] for model in (ours, eager, exact)]
        largest = max(want.norm() for want in gradients[-1])  # that of a bias of keys is nothing but rounding
        for got, theirs, want in zip(*gradients):
            assert (got - want).norm() <= 1.5 * (theirs - want).norm() + 1e-3 * largest
        assert all(p.grad.stride() == p.stride() for p in ours.parameters())
        assert all(p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in ours.parameters())
    assert kernels[True] <= kernels[False] - 12


def test_nested_reductions():
    x = torch.randn(4096, 4096, device="cuda", dtype=bf16)
    (rows, largest), fired = compiled(lambda x: (x.abs().amax(1), x.abs().amax()), x)
    assert fired["partial_reduction"] == 1
    assert torch.equal(rows, x.abs().amax(1)) and torch.equal(largest, x.abs().amax())


@pytest.mark.parametrize("beta", [1, 2.5, 0])
def test_biases(beta):
    a, b = torch.randn(64, 512, device="cuda"), torch.randn(512, 256, device="cuda")
    t = torch.full((256,), torch.nan, device="cuda") if beta == 0 else torch.randn(256, device="cuda")
    made, fired = compiled(lambda t, a, b: torch.addmm(t, a, b, beta=beta).relu(), t, a, b)
    assert fired["unfuse_bias_add_to_pointwise"] == 1
    torch.testing.assert_close(made, torch.addmm(t, a, b, beta=beta).relu(), atol=1e-4, rtol=1e-4)
    made, fired = compiled(lambda t, a, b: torch.add(a @ b, t, alpha=3), torch.randn(256, device="cuda", dtype=bf16),
                           a.to(bf16), b.to(bf16))  # fmt: skip
    assert fired["addmm"] == 1
