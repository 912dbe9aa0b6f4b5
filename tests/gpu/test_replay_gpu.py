"""CUDA graphs on a GPU: what a user holds never changes, what moves is noticed, and the clock decides."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from tests.replay_guarantees import *  # noqa: F403
from tests.replay_guarantees import WIDTH, Net, compiled, inputs
from triptych.replay.device import RecordedGraph
from triptych.replay.program import programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Counted:
    """Counts recordings and replays."""

    def __init__(self):
        self.graphs, self.replays = [], 0


@pytest.fixture
def codegen():
    return "inductor"


@pytest.fixture
def device(monkeypatch):
    counted, made = Counted(), RecordedGraph.__init__

    def noted(self, graph, memory):
        made(self, graph, memory)
        counted.graphs.append(self)
        replay = self.replay

        def counting():
            counted.replays += 1
            replay()

        self.replay = counting

    monkeypatch.setattr(RecordedGraph, "__init__", noted)
    torch.set_default_device("cuda")
    yield counted
    torch.set_default_device(None)
    torch._dynamo.reset()


def by_default(program, **options):
    return torch.compile(program, backend=triptych.compile_fx, options=options, dynamic=False)


def verdicts():
    return [program.verdict() for program in programs]


def test_random_numbers_are_those_without_replays(device):
    def program(x):
        return F.dropout(x, 0.5) * torch.rand_like(x)

    replayed, x = compiled(program, "inductor"), torch.ones(64)
    called = by_default(lambda x: program(x), cuda_graphs="off")
    for seed in range(6):
        torch.manual_seed(seed)
        mine = [replayed(x), replayed(x), torch.rand(2)]
        torch.manual_seed(seed)
        for value, want in zip(mine, [called(x), called(x), torch.rand(2)]):
            assert torch.equal(value, want)
    assert device.replays >= 8


def test_streams_of_the_user(device):
    model = Net()
    run, xs, streams = compiled(model, "inductor"), inputs(12), [torch.cuda.Stream() for _ in range(3)]
    held = []
    with torch.no_grad():
        for n, x in enumerate(xs):
            stream = streams[n % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                held.append(run(x))
        torch.cuda.synchronize()
        for x, y in zip(xs, held):
            torch.testing.assert_close(y, model(x))
    assert device.replays >= 8


def test_threads_of_the_user(device):
    model = Net()
    run, x, wrong = compiled(model, "inductor"), inputs(1)[0], []
    with torch.no_grad():
        run(x)
        want = model(x)

    def work():
        with torch.no_grad():
            for _ in range(50):
                y = run(x)
                if not torch.allclose(y, want, atol=1e-5):
                    wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and device.replays


def test_a_capture_of_the_user_around_the_call(device):
    model = Net()
    run, x = compiled(model, "inductor"), inputs(1)[0]
    with torch.no_grad():
        for _ in range(4):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, model(x))


def test_an_operator_that_waits_for_the_gpu(device):
    @torch.library.custom_op("replay_tests::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().cpu())

    @waits.register_fake
    def _(x):
        return torch.empty_like(x)

    def program(x):
        return waits(x.sin()).cos() + torch.rand_like(x) * 0

    for how in ({}, {"cuda_graphs": "on"}):  # the second one tries, and must leave no trace of it
        torch._dynamo.reset()
        run, x = by_default(program, **how), torch.randn(8)
        for _ in range(12):
            torch.testing.assert_close(run(x), program(x))
    torch.rand(3)
    assert any("waits" in text or "recording failed" in text for text in verdicts())


def test_a_program_is_split_around_work_on_a_cpu(device):
    def program(x, y):
        z = (x.sin() @ x.t()).relu()
        y = y * 2
        return (z + y.to(z.device)).cos() @ z

    run, x, y = compiled(program, "inductor"), torch.randn(8, 8), torch.randn(8, 8, device="cpu")
    for _ in range(6):
        torch.testing.assert_close(run(x, y), program(x, y))
        y += 1


def test_a_value_read_by_the_host(device):
    def program(x):
        y = x.sin().sum()
        return x * y.item() + 1

    run = compiled(program, "inductor")
    for x in inputs(6):
        torch.testing.assert_close(run(x), program(x))


def test_the_caches_are_emptied_and_the_profiler_runs(device):
    model = Net()
    run = compiled(model, "inductor")
    held = []
    for n, x in enumerate(inputs(8)):
        with torch.no_grad():
            if n == 5:
                with torch.profiler.profile():
                    held.append((run(x), model(x)))
            else:
                held.append((run(x), model(x)))
        torch.cuda.empty_cache()
        torch.randn(2**20)
    for mine, want in held:
        torch.testing.assert_close(mine, want)


def test_autocast_and_training_switches(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    want = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    want.load_state_dict(model.state_dict())
    run = compiled(model, "inductor")
    for n, x in enumerate(inputs(12)):
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=n % 2 == 0):
            want.load_state_dict(model.state_dict())
            want.eval()
            torch.testing.assert_close(run(x), want(x), atol=2e-2, rtol=2e-2)
        model.train()
        run(x).sum().backward()


class Deep(nn.Module):
    def __init__(self, width=64, depth=24):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def test_a_program_that_waits_for_the_host_is_replayed_by_default(device):
    model = Deep()
    run, x = by_default(model), torch.randn(8, 64)
    for _ in range(12):
        run(x).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
    found = verdicts()
    assert sum(text.startswith("replayed") for text in found) >= 2, found


def test_a_program_that_keeps_the_gpu_busy_is_not(device):
    run, x = by_default(lambda x: x @ x @ x), torch.randn(8192, 8192)
    for _ in range(8):
        run(x)
        torch.cuda.synchronize()
    assert not device.graphs and any("does not wait for the host" in text for text in verdicts()), verdicts()


def test_a_program_that_is_called_once_is_not(device):
    model = Deep(depth=3)
    by_default(model)(torch.randn(8, 64)).sum().backward()
    assert not device.graphs


def test_off_means_off(device):
    model = Deep(depth=3)
    run = by_default(model, cuda_graphs="off")
    for _ in range(10):
        run(torch.randn(8, 64))
    assert not device.graphs
