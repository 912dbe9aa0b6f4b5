"""The operators of symmetric memory themselves: two ranks, each with a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_distributed import assert_fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_fused_operators_compute_what_plain_torch_does(codegen):
    for outcomes in run_ranks("fused_operators", codegen=codegen, seconds=400):
        assert_fused(outcomes)
