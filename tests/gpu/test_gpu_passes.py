"""Whole-graph passes on a GPU: draws on the device, and constructors that are built there."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import triptych
from triptych.passes.session import watching
from triptych.post_grad.move_constructors_to_gpu import MoveConstructorsToGpu
from triptych.testing import compare_graphs, run_pass
from triptych.testing.capture import capture_aten

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N = 1_000_000
EPS = 6 / math.sqrt(N)


def compiled(program, *inputs):
    """The compiled program, and how often each pass fired while it was compiled."""
    torch._dynamo.reset()
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True)
    with watching() as sessions:
        run(*inputs)
    fired = Counter({})
    for record in (r for s in sessions for r in s.records):
        fired[record.name] += record.rewrites
    return run, fired


def test_draws_on_the_device():
    def program(x):
        return (
            torch.rand_like(x), torch.rand_like(x), torch.randn_like(x),
            torch.randint(-3, 10, x.shape, device=x.device),
            torch.rand(x.shape, dtype=torch.bfloat16, device=x.device), F.dropout(x, 0.25, training=True),
        )  # fmt: skip

    x = torch.ones(N, device="cuda")
    run, fired = compiled(program, x)
    assert fired["replace_random_passes"] == 6
    torch.manual_seed(3)
    first, second, normal, whole, short, dropped = run(x)
    for uniform in (first, second, short):
        assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.double().mean() - 0.5) < EPS
    assert abs(normal.mean()) < EPS and abs(normal.var() - 1) < 3 * EPS
    counts = torch.bincount(whole + 3, minlength=13).double() / N
    assert len(counts) == 13 and (counts - 1 / 13).abs().max() < EPS
    assert abs((dropped != 0).double().mean() - 0.75) < EPS
    assert (
        torch.corrcoef(torch.stack([first, second, normal])).sub(torch.eye(3, device="cuda")).abs().max()
        < EPS
    )
    torch.manual_seed(3)
    again = run(x)
    assert all(
        torch.equal(a, b) for a, b in zip(again, (first, second, normal, whole, short, dropped), strict=True)
    )
    assert not any(torch.equal(a, b) for a, b in zip(run(x), again, strict=True))


def test_forward_and_backward_draw_the_same():
    def program(x):
        return (F.dropout(x, 0.4, training=True) * torch.rand_like(x)).sum()

    run, fired = compiled(program, torch.ones(256, 256, device="cuda", requires_grad=True))
    assert fired["replace_random_passes"] == 2
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((256, 256), 2.0, device="cuda", dtype=dtype, requires_grad=True)
        loss = run(x)
        loss.backward()
        assert torch.allclose(
            (x.grad.double() * x.double()).sum(), loss.double(), rtol=1e-5 if dtype == torch.float32 else 2e-2
        )


def test_constructors_are_built_on_the_device():
    def program(x):
        steps = torch.arange(8) * 2 + 1
        causal = torch.arange(8).unsqueeze(0) <= torch.arange(8).unsqueeze(1)
        picked = x[torch.arange(4) + 1]
        return x + steps.to("cuda"), torch.where(causal.to("cuda"), x, 0.0), picked, x * torch.full((), 2.0)

    x = torch.randn(8, 8, device="cuda")
    gm, inputs = capture_aten(program, [x])
    before, _ = capture_aten(program, [x])
    tally = run_pass(MoveConstructorsToGpu, gm)
    assert tally.fired.total() >= 4 and not tally.declines
    assert not any("cpu" in str(n.kwargs.get("device")) for n in gm.graph.nodes)
    compare_graphs(before, gm, inputs)

    run, fired = compiled(program, x)
    assert fired["move_constructors_to_gpu"] + fired["fix_iota_device"] >= 1, fired
    for want, got in zip(program(x), run(x), strict=True):
        assert torch.equal(want, got)
