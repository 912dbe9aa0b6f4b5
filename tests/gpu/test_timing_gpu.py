"""Times that decisions rest on are those of the GPU, whatever the host does."""

from __future__ import annotations

import time

import pytest
import torch

from triptych.cost.timing import seconds
from triptych.post_grad.batch_gradient_sums import is_quicker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_host_does_not_count():
    x = torch.ones(1024, device="cuda")

    def launched_slowly():
        time.sleep(2e-3)
        x.add_(1)

    assert 0 < seconds(launched_slowly) < 2e-4


@pytest.mark.alone
def test_work_of_the_gpu_counts():
    x = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = seconds(lambda: x @ x)
    assert 2 * 8192**3 / product < 2e15  # operations a second: more than any GPU has
    assert 1.5 < seconds(lambda: (x @ x, x @ x)) / product < 2.5


@pytest.mark.alone
def test_sums_of_many_gradients_are_quicker_together():
    assert is_quicker(torch.device("cuda", torch.cuda.current_device()))
