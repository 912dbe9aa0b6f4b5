"""Times that decisions rest on are those of the GPU, whatever the host does."""

from __future__ import annotations

import time

import pytest
import torch

from triptych.cost import Moved, Product, Work, clock
from triptych.cost.decision import choose
from triptych.cost.timing import seconds
from triptych.kernels.sum_parts import MOST
from triptych.post_grad.batch_gradient_sums import USUAL

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
    device = torch.device("cuda", torch.cuda.current_device())
    one_by_one = MOST * Work.of(device, Moved(USUAL.bytes / MOST))
    assert choose(one_by_one, Work.of(device, USUAL), "all").pays


def test_work_is_timed_part_by_part(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_known", {})
    device = torch.device("cuda", torch.cuda.current_device())
    x, w, b = torch.empty(64, 256), torch.empty(512, 256), torch.empty(512)
    many = Product.sized(64, 512, 256, torch.bfloat16, batch=3)
    work = Work.of(device, Product.of(x, w.t()), Product.of(x, w.t(), b), many, Moved(2 << 20))
    times = clock.clocked(work, work)
    assert times is not None and 4 * work.model.launch < times[0].seconds < 1e-3
    assert len(clock._known) == 4


def test_what_a_gpu_cannot_compute_is_not_timed():
    device = torch.device("cuda", torch.cuda.current_device())
    work = Work.of(device, Product.sized(8, 8, 8, torch.int64), Moved(8))
    assert clock.clocked(work, work) is None
