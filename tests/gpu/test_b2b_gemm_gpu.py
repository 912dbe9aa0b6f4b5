"""Two products in one kernel: equal results, whatever the sizes, strides and function, and quicker where it is taken."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import triptych
from tests.clock import clock_says
from triptych.cost import clock
from triptych.cost.timing import rounds_on_gpu
from triptych.passes.session import watching
from triptych.rules import two_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "squared": lambda x: F.relu(x).square() + 1,  # not 0 at 0
    "sigmoid": torch.sigmoid,
    "reciprocal": lambda x: 1 / x.abs().clamp(min=0.1),
}
SIZES = [(1000, 50, 777, 33), (64, 16, 4096, 256), (17, 3, 300, 5), (513, 256, 2048, 3)]


@pytest.fixture
def own_measurements(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "_known", {})


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(two_products, "FAR_LARGER", 0)
    clock_says(monkeypatch, lambda old, new: (1.0, 0.6) if isinstance(new.parts[0], two_products.B2bGemm) else None)


def compiled(program, *inputs):
    torch._dynamo.reset()
    # those two, where they are measured to be quicker, leave a slice or no product at all
    others = ("pad_mm", "decompose_mem_bound_mm")
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, options={"remove_passes": others})
    with torch.no_grad(), watching() as sessions:
        result = run(*inputs)
    return run, result, sum(r.fired["fused_products"] for s in sessions for r in s.records)


def check(program, *inputs, fires=1):
    with torch.no_grad():
        _, actual, fired = compiled(program, *inputs)
        exact = program(*(x.double() for x in inputs))
        eager = program(*inputs)
    assert fired == fires
    assert actual.dtype == eager.dtype and actual.stride() == eager.stride()
    ours, theirs = ((result - exact).abs().max().item() for result in (actual, eager))
    assert ours <= 2 * theirs + 1e-5 * exact.abs().max().item()


def matrices(m, k, n, p, dtype):
    torch.manual_seed(0)
    sizes = (m, k), (k, n), (n, p)
    a, b, c = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    return a, b / math.sqrt(k), c / math.sqrt(n)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_functions(always, function, dtype):
    f = FUNCTIONS[function]
    check(lambda a, b, c: f(a @ b) @ c, *matrices(*SIZES[0], dtype))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sizes(always, sizes, dtype, monkeypatch):
    if dtype == torch.float32:  # to compile all configurations takes minutes
        monkeypatch.setattr(torch._inductor.config, "deterministic", True)
    a, b, c = matrices(*sizes, dtype)
    check(lambda a, b, c: F.silu(a @ b) @ c, a, b, c)
    check(lambda a, b, c: c.t() @ F.silu(b.t() @ a.t()), a, b, c)


def test_strides(always):
    a, b, c = matrices(256, 64, 512, 48, torch.bfloat16)
    check(lambda a, b, c: F.relu(a @ b) @ c, a.t().contiguous().t(), b.t().contiguous().t(), c.t().contiguous().t())
    check(lambda a, b, c: F.relu(a[::2] @ b[:, ::2]) @ c[::2], a, b, c)


def test_biases(always):
    a, b, c = matrices(256, 64, 512, 48, torch.bfloat16)
    first, second = torch.randn(512, device="cuda").bfloat16(), torch.randn(48, device="cuda").bfloat16()
    check(lambda x, w, v, c, d: F.linear(F.relu(F.linear(x, w, v)), c, d), a, b.t(), first, c.t(), second)


# ---- training ----


class Step:
    """A training step: what the forward holds for the backward, and results and gradients for a fixed gradient."""

    def __init__(self, program, *inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.manual_seed(1)
        before = torch.cuda.memory_allocated()
        result = program(*leaves)
        self.held = torch.cuda.memory_allocated() - before
        gradients = torch.autograd.grad(result, leaves, torch.randn_like(result, dtype=torch.float64).to(result.dtype))
        self.values = [result.detach(), *gradients]


def trained(program, *inputs, remove=()):
    """The compiled program, a step with it, and the number of rewrites and decisions of the pass."""
    torch._dynamo.reset()
    options = {"remove_passes": ["pad_mm", "decompose_mem_bound_mm", *remove]}
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, options=options)
    with watching() as sessions:
        Step(run, *inputs)
    records = [r for s in sessions for r in s.records if r.name == "recompute_between_products"]
    return run, Step(run, *inputs), sum(r.fired.total() for r in records), [d for r in records for d in r.decisions]


def check_trained(program, *inputs):
    _, ours, fired, _ = trained(program, *inputs)
    exact, eager = Step(program, *(x.double() for x in inputs)), Step(program, *inputs)
    assert fired == 1
    for got, wanted, theirs in zip(ours.values, exact.values, eager.values, strict=True):
        assert got.dtype == theirs.dtype and got.stride() == theirs.stride()
        errors = [(one - wanted).abs().max().item() for one in (got, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-5 * wanted.abs().max().item()


@pytest.mark.parametrize("function", ["gelu", "silu", "sigmoid", "hardswish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training(always, function, dtype):
    f = FUNCTIONS[function]
    check_trained(lambda a, b, c: f(a @ b) @ c, *matrices(512, 48, 768, 32, dtype))


def test_training_of_layers(always):
    a, b, c = matrices(256, 64, 512, 48, torch.bfloat16)
    first, second = torch.randn(512, device="cuda").bfloat16(), torch.randn(48, device="cuda").bfloat16()
    sequences = a.view(4, 64, 64)
    check_trained(lambda x, w, v, c, d: F.linear(F.gelu(F.linear(x, w, v)), c, d), sequences, b.t(), first, c.t(), second)
    check_trained(lambda a, b, c: c.t() @ F.silu(b.t() @ a.t()), a, b, c)


@pytest.mark.alone
def test_training_holds_less_and_is_not_slower(own_measurements, capsys):
    inputs = matrices(65536, 64, 4096, 64, torch.bfloat16)
    middle = 65536 * 4096 * 2

    def program(a, b, c):
        return F.gelu(a @ b) @ c

    ours, fused, fired, decisions = trained(program, *inputs)
    assert fired == 1 and decisions[0].measured and decisions[0].saves == middle
    theirs, apart, none, _ = trained(program, *inputs, remove=["recompute_between_products"])
    assert none == 0
    for got, wanted in zip(fused.values, apart.values, strict=True):
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert fused.held <= apart.held - middle  # gelu and its argument are both held otherwise
    best = [math.inf, math.inf]
    for _ in range(4):
        for i, run in enumerate((theirs, ours)):
            best[i] = min(best[i], *rounds_on_gpu(lambda run=run: Step(run, *inputs), rounds=2))
    with capsys.disabled():
        print(f"\ngelu, a training step: {1e3 * best[0]:.3f} ms apart, {1e3 * best[1]:.3f} ms fused; {decisions[0]}")
    assert best[1] <= 1.1 * best[0]


@pytest.mark.alone
@pytest.mark.parametrize("function, least", [("relu", 3.0), ("gelu", 1.7)])
def test_quicker_than_inductor(own_measurements, function, least, capsys):
    f = FUNCTIONS[function]
    inputs = matrices(65536, 64, 4096, 64, torch.bfloat16)

    def program(a, b, c):
        return f(a @ b) @ c

    with torch.no_grad():
        ours, _, fired = compiled(program, *inputs)
        inductor = torch.compile(program, backend="inductor")
        best = [math.inf, math.inf]
        for _ in range(4):
            for i, run in enumerate((inductor, ours)):
                best[i] = min(best[i], *rounds_on_gpu(lambda run=run: run(*inputs), rounds=2))
    with capsys.disabled():
        print(f"\n{function}: Inductor {1e3 * best[0]:.3f} ms, ours {1e3 * best[1]:.3f} ms, {best[0] / best[1]:.2f}x")
    assert fired == 1 and best[0] / best[1] >= least
