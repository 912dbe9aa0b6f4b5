"""`fuse_attention_aten_pass` on a GPU: the kernel is one that torch has there, and gives what eager gives."""

from __future__ import annotations

import math

import pytest
import torch

import triptych

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = {"add_passes": ["fuse_attention_aten_pass"], "remove_passes": ["fuse_attention"]}


def _plain(q, k, v, mask):
    return (q @ k.mT / 8).softmax(-1) @ v


def _causal(q, k, v, mask):
    above = torch.ones(q.shape[-2], q.shape[-2], device=q.device, dtype=torch.bool).triu(1)
    return (q @ k.mT / 8).masked_fill(above, -math.inf).softmax(-1) @ v


def _masked(q, k, v, mask):
    return torch.softmax((q @ k.mT / 8).masked_fill(mask, -math.inf).float(), -1).to(q.dtype) @ v


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("program", [_plain, _causal, _masked])
def test_kernels(program, codegen, monkeypatch):
    monkeypatch.setattr("triptych.attention.fuse.require_quicker", lambda m, plan: None)  # whatever the times are today
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(2, 1, 128, 128, device="cuda") > 0.7
    mask[0, 0, 5] = True
    options = {**OPTIONS, "codegen": codegen}
    with torch.no_grad():
        explanation = triptych.explain(program, q, k, v, mask, options=options)
        (record,) = explanation.runs_of("fuse_attention_aten_pass")
        assert record.fired["fuse_attention_aten"] == 1, [d.reason for d in record.declines]
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=triptych.compile_fx, options=options)
        got, want = compiled(q, k, v, mask), program(*(x.double() for x in (q, k, v)), mask)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2, equal_nan=True)
