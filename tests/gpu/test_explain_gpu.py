"""Explain on a GPU: the backward runs in another thread there, and random numbers live on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import triptych

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["triptych", "inductor"])
def test_training_on_a_gpu_is_explained_and_leaves_no_trace(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.GELU()).cuda()
    x = torch.randn(32, 64, device="cuda")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.cuda.get_rng_state()
    explanation = triptych.explain(model, x, train=True, backend=backend)
    assert {"dynamo", "pre_grad", "joint", "forward", "backward"} == set(explanation.graphs)
    assert all("triton" in source for source in explanation.kernels.values())
    assert set(explanation.kernels) == {"forward", "backward"}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_state, torch.cuda.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
