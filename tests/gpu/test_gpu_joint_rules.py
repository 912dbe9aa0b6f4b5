"""The joint rules on a GPU: padding measured and timed, draws on the device, indices that raise, contraction."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import triptych
from tests.test_random_statistics import (
    N,
    check_distribution,
    check_independent,
    check_moments,
    normal_cdf,
    uniform_cdf,
)
from triptych.cost import clock, decision
from triptych.cost.clock import Clocked
from triptych.cost.store import store_path
from triptych.cost.timing import rounds_on_gpu
from triptych.passes.session import watching

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def own_measurements(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_known", {})
    monkeypatch.setattr(clock, "brought_answer", lambda *_: None)
    return store_path(clock.MEASUREMENTS)


def compiled(program, *inputs, **options):
    torch._dynamo.reset()
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, options=options)
    with watching() as sessions:
        run(*inputs)
    return run, [r for s in sessions for r in s.records if r.name in ("pass_patterns", "pad_mm") and r.stage == "joint"]


def milliseconds(*runs):
    """The best of each, in turns: other work on the machine only adds, and to all of them."""
    best = [math.inf] * len(runs)
    for _ in range(5):
        best = [min(before, 1e3 * min(rounds_on_gpu(run, rounds=2))) for before, run in zip(best, runs, strict=True)]
    return best


SIZES = [
    (4096, 4095, 4095), (8192, 768, 50257), (2048, 1023, 1025), (512, 513, 511), (64, 63, 65), (16384, 100, 50),
    (1, 4095, 4095),
]  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize("m, k, n", SIZES)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_padding_is_never_slower(own_measurements, m, k, n, dtype, capsys):
    def program(x, w):
        return F.linear(x.relu(), w).relu()

    x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype) / math.sqrt(k)
    with torch.no_grad():
        plain, _ = compiled(program, x, w, remove_passes="pad_mm")
        chosen, records = compiled(program, x, w)
        without, with_it = milliseconds(lambda: plain(x, w), lambda: chosen(x, w))
        exact = program(x.double(), w.double())
        assert (chosen(x, w) - exact).abs().max() <= 2 * (program(x, w) - exact).abs().max() + 1e-3
    fired = sum(r.fired["pad_mm"] for r in records)
    told = [str(d) for r in records for d in r.decisions] + [d.reason for r in records for d in r.declines if d.rule == "pad_mm"]
    with capsys.disabled():
        print(f"\npad_mm {dtype} {m}x{k}x{n}: {without:.4f} ms -> {with_it:.4f} ms, fired {fired}; {told}")
    assert told, "it was neither done nor declined"
    assert with_it <= 1.1 * without + 0.005


@pytest.mark.alone
def test_padding_pays_somewhere(own_measurements):
    a, b = (torch.randn(4095, 4095, device="cuda", dtype=bf16) for _ in range(2))
    _, records = compiled(lambda a, b: a @ b, a, b)
    (decision,) = [d for r in records for d in r.decisions if d.rule == "pad_mm"]
    assert decision.after < decision.before


@pytest.mark.alone
def test_a_measurement_is_made_once(own_measurements, monkeypatch):
    a, b = (torch.randn(1023, 1023, device="cuda", dtype=bf16) for _ in range(2))
    compiled(lambda a, b: a @ b, a, b)
    kept = own_measurements.read_text()
    assert kept.count("Product(") == 2

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(clock, "rounds_on_gpu", never)
    compiled(lambda a, b: a @ b, a, b)  # from memory
    clock.forget()
    compiled(lambda a, b: a @ b, a, b)  # from disk
    assert own_measurements.read_text() == kept


def test_the_model_answers_where_measuring_is_not_allowed(own_measurements):
    a, b = (torch.randn(4095, 4095, device="cuda", dtype=bf16) for _ in range(2))
    _, records = compiled(lambda a, b: a @ b, a, b, **{"pad_mm.measure": False})
    assert sum(r.fired["pad_mm"] for r in records) == 1 and not own_measurements.exists()


def test_padding_in_training():
    model = torch.nn.Sequential(torch.nn.Linear(1023, 4095), torch.nn.GELU(), torch.nn.Linear(4095, 1001)).cuda().to(bf16)
    x = torch.randn(4096, 1023, device="cuda", dtype=bf16)
    wanted = torch.autograd.grad(model(x).float().square().mean(), list(model.parameters()))
    run, records = compiled(model, x, **{"pad_mm.measure": False})
    got = torch.autograd.grad(run(x).float().square().mean(), list(model.parameters()))
    assert sum(r.fired["pad_mm"] for r in records) >= 1
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm()


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("sizes", [(300, 64, 1027), (1000, 768, 5001), (3, 16, 9)], ids=str)
def test_rows_of_an_odd_length(sizes, dtype, monkeypatch):
    monkeypatch.setattr(decision, "clocked", lambda old, new: (Clocked(1.0), Clocked(0.5)))
    m, k, n = sizes
    x, w, b = (torch.randn(size, device="cuda", dtype=dtype) for size in ((m, k), (n, k), (n,)))
    for program in (lambda x, w, b: x @ w.t(), lambda x, w, b: F.linear(x, w, b)):
        run, records = compiled(program, x, w, b)
        assert sum(r.fired["unaligned_linear"] for r in records) == 1
        got, exact = run(x, w, b), program(x.double(), w.double(), b.double())
        assert got.is_contiguous()
        error = torch.finfo(dtype).eps * exact.abs().max().item()
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=error)


@pytest.mark.alone
@pytest.mark.parametrize("sizes", [(1024, 512, 51865), (4096, 768, 50257)], ids=str)
def test_scores_of_a_vocabulary_of_an_odd_size(sizes, own_measurements, capsys):
    m, k, n = sizes
    x, w = (torch.randn(size, device="cuda", dtype=bf16) for size in ((m, k), (n, k)))
    program = lambda x, w: x @ w.t()  # noqa: E731
    with torch.no_grad():
        ours, records = compiled(program, x, w)
        padded, _ = compiled(program, x, w, **{"pad_mm.unaligned": False})
        times = milliseconds(lambda: padded(x, w), lambda: ours(x, w))
    with capsys.disabled():
        decisions = [str(d) for r in records for d in r.decisions]
        print(f"\n{sizes}: padded {times[0]:.4f} ms, ours {times[1]:.4f} ms; {decisions}")
    # the decision was timed too: of two ways that take about as long, either may have been chosen
    assert times[1] <= 1.1 * times[0]


def test_cross_entropy_without_a_scatter():
    x = torch.randn(512, 32000, device="cuda", requires_grad=True)
    target = torch.randint(0, 32000, (512,), device="cuda")
    run, records = compiled(F.cross_entropy, x, target)
    assert sum(r.fired["scatter_upon_const_tensor"] for r in records) == 1
    (wanted,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    (got,) = torch.autograd.grad(run(x, target), x)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("size", [128, 5000])
def test_large_scores_do_not_overflow_by_contraction(dtype, size):
    """x * s - max(x * s), contracted into one rounding, may be far above 0 for large scores."""
    x = torch.rand(64, size, device="cuda").mul(1e9).add(1e12).to(dtype)
    run, records = compiled(lambda x: F.softmax(x * 0.3, -1), x)
    assert sum(r.fired["mul_softmax_pattern"] for r in records) == 1
    result = run(x)
    assert result.isfinite().all()
    torch.testing.assert_close(result.float().sum(-1), torch.ones(64, device="cuda"), rtol=1e-2, atol=1e-2)


def test_positions_counted_on_the_device():
    def program(x):
        return x[torch.arange(8)] + (torch.arange(64) * 2).to("cuda")

    x = torch.randn(64, 64, device="cuda")
    run, records = compiled(program, x)
    assert sum(r.fired["fix_iota_device"] for r in records) == 2
    assert torch.equal(run(x), program(x))


def test_a_batch_of_one():
    a, b = torch.randn(1, 256, 512, device="cuda", dtype=bf16), torch.randn(1, 512, 128, device="cuda", dtype=bf16)
    run, records = compiled(torch.bmm, a, b)
    assert sum(r.fired["bmm_to_mm"] for r in records) == 1
    torch.testing.assert_close(run(a, b), torch.bmm(a, b), rtol=2e-2, atol=0.2)


def test_draws_on_the_device():
    def program(x):
        return (
            torch.rand_like(x), torch.empty_like(x).uniform_(-1, 2), torch.randn_like(x), torch.empty_like(x).normal_(1, 2),
            torch.empty_like(x).exponential_(2.0), torch.empty_like(x).bernoulli_(0.3), F.dropout(torch.ones_like(x), 0.25),
        )  # fmt: skip

    x = torch.zeros(N, device="cuda")
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True)
    torch.manual_seed(3)
    drawn = [d.cpu() for d in run(x)]
    torch.manual_seed(3)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(drawn, run(x), strict=True))
    rand, uniform, randn, normal, exponential, chance, dropped = drawn
    check_distribution(rand, uniform_cdf())
    check_distribution(uniform, uniform_cdf(-1, 2))
    check_distribution(randn, normal_cdf())
    check_distribution(normal, normal_cdf(1, 2))
    check_distribution(exponential, lambda x: 1 - torch.exp(-2 * x))
    check_moments(chance, 0.3, 0.21)
    check_moments(dropped, 1.0, 0.25 / 0.75)
    check_independent(*drawn)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_what_is_computed_again_is_computed_from_the_same_seeds(budget):
    def program(x):
        x = F.dropout(x, 0.3) * torch.rand_like(x)
        return (F.dropout(x, 0.2) * torch.empty_like(x).exponential_()).sum()

    x = torch.rand(256, 256, device="cuda").add(0.5).requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        loss = torch.compile(program, backend=triptych.compile_fx, fullgraph=True)(x)
        loss.backward()
    assert torch.allclose((x.grad * x).sum(), loss, rtol=1e-3)
