"""triptych::norm_backward on a GPU: its kernel against its definition, and training steps that use it."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import triptych
from tests.test_norm_backward import Block, BlockWithNormsLast, operands, stack
from triptych.kernels.norm_backward import anywhere
from triptych.passes.session import watching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("dtypes", [(f32, f32, f32), (bf16, bf16, bf16), (f32, bf16, f32), (f16, f16, f32)], ids=str)
@pytest.mark.parametrize("shape", [(4, 1024, 768), (2, 197, 384), (33, 40), (5, 5000), (3, 8192), (130, 1), (0, 8)], ids=str)
def test_the_kernel(shape, dtypes):
    dtype, grad_dtype, weight_dtype = dtypes
    for others in (False, True):
        how = {"dtype": dtype, "grad_dtype": grad_dtype, "weight_dtype": weight_dtype}
        given, _ = operands(*shape, **how, added=others, other=others)
        given = [None if t is None else t.cuda() for t in given]
        wanted = anywhere(*given, 16, others)
        results = torch.ops.triptych.norm_backward(*given, 16, others)
        tolerance = {f32: 1e-5, bf16: 2e-2, f16: 2e-3}[dtype]
        for got, want in zip(results, wanted, strict=True):
            assert got.stride() == want.stride() and got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 8)


def trained(model: nn.Module, x: torch.Tensor, **options) -> tuple[Counter, list[torch.Tensor], int]:
    """How often each rule fired in the backward, the gradients, and the kernels that it launches."""
    torch._dynamo.reset()
    call = torch.compile(model, backend=triptych.compile_fx, options={"on_error": "raise", "tune": "off", **options})
    x = x.clone().requires_grad_()
    with watching() as sessions:
        (call(x).float().square().mean() * 100).backward()
    fired = sum((Counter(r.fired) for s in sessions for r in s.records if r.graph == "backward"), Counter())
    return fired, [x.grad, *(p.grad for p in model.parameters())], sessions[0].kernels["backward"].count(".run(")


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("block", [Block, BlockWithNormsLast])
def test_gradients_of_a_transformer(block, dtype):
    exact = stack(256, block=block).cuda()
    eager = copy.deepcopy(exact).to(dtype)
    x = torch.randn(4, 1024, 256, device="cuda")
    fired, ours, launched = trained(copy.deepcopy(eager), x.to(dtype))
    never, apart, launched_apart = trained(copy.deepcopy(eager), x.to(dtype), remove_passes="fuse_norm_backward")
    assert fired["fused_norm_backward"] >= 4 and not never["fused_norm_backward"]
    assert fired["batch_gradient_sums"] and launched < launched_apart
    gradients = []
    for model, given in ((eager, x.to(dtype)), (exact, x.clone())):
        (model(given.requires_grad_()).float().square().mean() * 100).backward()
        gradients.append([given.grad, *(p.grad for p in model.parameters())])
    largest = max(want.norm() for want in gradients[1])  # that of a bias of keys is nothing but rounding
    for got, other, theirs, want in zip(ours, apart, *gradients, strict=True):
        assert got.dtype == theirs.dtype and got.stride() == theirs.stride()
        allowed = max((theirs - want).norm(), (other - want).norm())
        assert (got - want).norm() <= 1.5 * allowed + 1e-3 * largest


def test_the_decision_is_timed():
    """Both ways are timed on the device, and both figures are told, whichever is taken."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 768)) for _ in range(3))).cuda().to(bf16)
    x = torch.randn(4096, 768, device="cuda", dtype=bf16)
    exp = triptych.explain(model, x, train=True, options={"tune": "all"})
    decisions = [d for p in exp.passes if p.name == "fuse_norm_backward" for d in p.decisions]
    assert decisions and all(d.measured for d in decisions)
    print("\n", [str(d) for d in decisions])
