"""freeze on a GPU: CUDA graphs read the constants where they lie, and see new ones."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from triptych.backend import compile_fx
from triptych.passes.session import watching

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Joined(nn.Module):
    """Three linears over one input as one, and a convolution with its norm."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x, image):
        weight = torch.cat([p.weight for p in self.parts])
        y = F.linear(x, weight, torch.cat([p.bias for p in self.parts]))
        return y.relu(), self.norm(self.conv(image)).relu()


def step(model, **how):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


CHANGES = (
    lambda m: None, lambda m: step(m), lambda m: step(m, fused=True), lambda m: step(m, foreach=True),
    lambda m: m.load_state_dict(Joined().cuda().state_dict()),
    lambda m: m.load_state_dict(Joined().cuda().state_dict(), assign=True),
)  # fmt: skip


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_changes_show(codegen, mode):
    model = Joined().cuda().eval()
    call = torch.compile(model, backend=compile_fx, options={"codegen": codegen, "mode": mode, "freeze": True})
    x, image = torch.randn(32, 64, device="cuda"), torch.randn(2, 3, 16, 16, device="cuda")
    for change in CHANGES:
        change(model)
        with torch.no_grad():
            for _ in range(4):  # a CUDA graph is warmed up, recorded, replayed
                for got, want in zip(call(x, image), model(x, image)):
                    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_cuda_graphs_copy_no_constants():
    counters = torch._dynamo.utils.counters["inductor"]
    model = Joined().cuda().eval()
    call = torch.compile(model, backend=compile_fx, options={"mode": "reduce-overhead", "freeze": True})
    x, image = torch.randn(32, 64, device="cuda"), torch.randn(2, 3, 16, 16, device="cuda")
    with torch.no_grad(), watching() as sessions:
        for _ in range(4):
            call(x, image)
        assert any(r.rewrites for r in sessions[0].records if r.name == "freeze")
        assert counters["cudagraph_recorded_non_static_inputs"] == 2, dict(counters)  # x and the image
        model.parts[0].weight.mul_(2)
        for got, want in zip(call(x, image), model(x, image)):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        assert counters["cudagraph_recorded_non_static_inputs"] == 2, "recorded again"


@pytest.mark.parametrize("level", ["final", "each"])
def test_numbers_are_compared_on_the_gpu(level):
    model = Joined().cuda().eval().bfloat16()
    x, image = (torch.randn(s, device="cuda").bfloat16() for s in ((32, 64), (2, 3, 16, 16)))
    call = torch.compile(model, backend=compile_fx, options={"verify": level, "freeze": True})
    with torch.no_grad(), watching() as sessions:
        call(x, image)
    assert not [w for s in sessions for w in s.warnings]
