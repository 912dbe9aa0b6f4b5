"""Draws as a statistician sees them: distribution, independence, agreement; and the checks fail what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import triptych
from triptych.passes.session import watching

N = 100_000
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


# ---- the checks: each about one in ten thousand times wrong on a right generator, and the seeds are fixed ----


def check_distribution(draws, cumulative):
    """Kolmogorov-Smirnov: the largest gap between how many draws are below a value and how many should be."""
    ordered = draws.double().flatten().sort().values
    expected = cumulative(ordered)
    count = len(ordered)
    above = torch.arange(1, count + 1, dtype=torch.double) / count - expected
    below = expected - torch.arange(count, dtype=torch.double) / count
    gap = torch.maximum(above.max(), below.max()).item()
    # a coarse dtype has steps of its own, no larger than its precision
    assert gap < 2.2 / math.sqrt(count) + torch.finfo(draws.dtype).eps, f"gap {gap}"


def check_moments(draws, mean, variance):
    values = draws.double()
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / N) + torch.finfo(draws.dtype).eps
    assert abs(values.var() / variance - 1) < 20 / math.sqrt(N) + torch.finfo(draws.dtype).eps


def check_independent(*draws):
    """No linear dependence between draws, nor of squares, nor of neighbours, nor of far elements of one draw."""
    limit = 5 / math.sqrt(N)
    rows = torch.stack([d.double().flatten() for d in draws])
    for view in (rows, (rows - rows.mean(1, keepdim=True)).square()):
        off = torch.corrcoef(view) - torch.eye(len(draws))
        assert off.abs().max() < limit, "two draws depend on each other"
        for lag in (1, 2, 4, 8, 16, 256, N // 2):
            for row in view:
                pair = torch.stack([row[lag:], row[:-lag]])
                assert torch.corrcoef(pair)[0, 1].abs() < limit * math.sqrt(N / (N - lag)), f"a draw depends on itself, {lag} on"


def normal_cdf(mean=0.0, std=1.0):
    return lambda x: 0.5 * (1 + torch.erf((x - mean) / std / math.sqrt(2)))


def uniform_cdf(low=0.0, high=1.0):
    return lambda x: ((x - low) / (high - low)).clamp(0, 1)


WRONG = {
    "not flat": lambda u: u**1.03,
    "shifted": lambda u: (u + 0.01) % 1 * 0.99,
    "too few values": lambda u: (u * 64).floor() / 64,
    "one missing tenth": lambda u: u * 0.9,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_check_of_distributions_fails_what_is_wrong(name):
    torch.manual_seed(0)
    right = torch.rand(N)
    check_distribution(right, uniform_cdf())
    with pytest.raises(AssertionError, match="gap"):
        check_distribution(WRONG[name](right), uniform_cdf())


def test_the_check_of_independence_fails_what_is_wrong():
    torch.manual_seed(0)
    first, second = torch.rand(N), torch.rand(N)
    check_independent(first, second)
    with pytest.raises(AssertionError, match="each other"):  # one seed for two draws
        check_independent(first, first.clone())
    with pytest.raises(AssertionError, match="each other"):  # a little of one in the other
        check_independent(first, 0.95 * second + 0.05 * first)
    with pytest.raises(AssertionError, match="itself"):  # a counter that starts again
        check_independent(first[: N // 2].repeat(2), second)
    with pytest.raises(AssertionError, match="itself"):  # two elements of one number
        check_independent(first[: N // 2].repeat_interleave(2), second)


# ---- the draws ----


def every_draw(x):
    return (
        torch.rand_like(x), torch.rand(N, dtype=f16), torch.rand(N, dtype=bf16), torch.empty_like(x).uniform_(-1, 2),
        torch.randn_like(x), torch.empty_like(x).normal_(1, 2), torch.normal(x, 3.0), torch.randn(N, dtype=f16),
        torch.empty_like(x).exponential_(2.0), torch.empty_like(x).log_normal_(), torch.empty_like(x).cauchy_(),
        torch.bernoulli(x), torch.empty_like(x).bernoulli_(0.3), torch.empty_like(x).bernoulli_(x),
        F.dropout(torch.ones_like(x), 0.25), torch.randint(-3, 10, (N,)), torch.randint_like(x, 4),
        F.rrelu(-torch.ones_like(x), 0.25, 0.5, training=True),
    )  # fmt: skip


@pytest.fixture(scope="module")
def drawn():
    """All draws of one compiled program, twice from one seed and once more."""
    torch._dynamo.reset()
    x = torch.full((N,), 0.3)
    run = torch.compile(every_draw, backend=triptych.compile_fx, fullgraph=True)
    with watching() as sessions:
        run(x)
    fired = sum((r.fired for s in sessions for r in s.records if r.name == "replace_random_passes"), start=type(
        sessions[0].records[0].fired)())  # fmt: skip
    loads = [n for n in sessions[0].graphs["forward"].graph.nodes if "inductor_seeds" in str(n.target)]
    torch.manual_seed(7)
    first = run(x)
    torch.manual_seed(7)
    again, later = run(x), run(x)
    return fired, loads, first, again, later


def test_every_draw_is_the_backends_and_one_load_of_seeds_serves_them(drawn):
    fired, loads, first, *_ = drawn
    assert fired.total() - fired["load_seeds"] == len(first)
    assert len(loads) == 1 and loads[0].args[0] == len(first)


def test_a_seed_reproduces_and_a_later_call_differs(drawn):
    _, _, first, again, later = drawn
    for one, same, other in zip(first, again, later, strict=True):
        assert torch.equal(one, same) and not torch.equal(one, other)


def test_distributions(drawn):
    (
        rand, rand_f16, rand_bf16, uniform, randn, normal, around, randn_f16, exponential, log_normal, cauchy,
        chance, chance_p, chance_t, dropped, whole, whole_like, leaks,
    ) = drawn[2]  # fmt: skip
    for draws in (rand, rand_f16, rand_bf16):
        assert draws.min() >= 0 and draws.max() < 1
        check_distribution(draws, uniform_cdf())
        check_moments(draws, 0.5, 1 / 12)
    assert uniform.min() >= -1 and uniform.max() < 2
    check_distribution(uniform, uniform_cdf(-1, 2))
    assert leaks.min() >= -0.5 and leaks.max() <= -0.25
    check_distribution(leaks, uniform_cdf(-0.5, -0.25))
    for draws, mean, std in ((randn, 0, 1), (normal, 1, 2), (around, 0.3, 3), (randn_f16, 0, 1)):
        check_distribution(draws, normal_cdf(mean, std))
        check_moments(draws, mean, std**2)
    assert exponential.min() > 0 and exponential.isfinite().all()
    check_distribution(exponential, lambda x: 1 - torch.exp(-2 * x))
    check_moments(exponential, 0.5, 0.25)
    check_distribution(log_normal.log(), normal_cdf(1, 2))
    check_distribution(cauchy, lambda x: torch.atan(x) / math.pi + 0.5)
    for draws in (chance, chance_p, chance_t):
        assert set(draws.unique().tolist()) == {0.0, 1.0}
        check_moments(draws, 0.3, 0.21)
    check_moments(dropped, 1.0, 0.25 / 0.75)
    for draws, low, many in ((whole, -3, 13), (whole_like.long(), 0, 4)):
        share = torch.bincount(draws - low, minlength=many).double() / N
        assert len(share) == many and (share - 1 / many).abs().max() < 5 * math.sqrt(1 / many / N)


def test_draws_are_independent(drawn):
    first, later = drawn[2], drawn[4]
    floats = [d.double() for i, d in enumerate(first) if i not in (9, 10)]  # without those of no bounded moments
    check_independent(*floats)
    check_independent(first[0], later[0], first[4], later[4])


# ---- forward and backward ----


def linear_in(x):
    """Linear in x, so that the gradient times x gives the value back, if both directions saw the same draws."""
    x = F.dropout(x, 0.3) * torch.rand_like(x)
    x = x * torch.empty_like(x).uniform_(0.5, 1.5) * (torch.randn_like(x) * 2).abs()
    return (F.dropout(x, 0.2) * torch.empty_like(x).exponential_()).sum()


def checkpointed(x):
    return checkpoint(linear_in, x, use_reentrant=False)


@pytest.mark.parametrize("how, dynamic", [
    ("plain", False), ("recomputed", True), ("half recomputed", False), ("checkpointed", True),
    pytest.param("recomputed", False, marks=pytest.mark.slow), pytest.param("checkpointed", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_forward_and_backward_see_the_same_draws(how, dynamic):
    program = checkpointed if how == "checkpointed" else linear_in
    # a budget of nothing: the partitioner computes everything again in the backward, if it may
    budget = {"recomputed": 0.0, "half recomputed": 0.5}.get(how, 1.0)
    x = torch.rand(64, 64).add(0.5).requires_grad_()
    with torch._functorch.config.patch(activation_memory_budget=budget), watching() as sessions:
        run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, dynamic=dynamic)
        for _ in range(2):
            x.grad = None
            loss = run(x)
            loss.backward()
            assert torch.allclose((x.grad * x).sum(), loss, rtol=1e-4)
    (session,) = sessions
    calls = {g: [n for n in session.graphs[g].graph.nodes if n.op == "call_function"] for g in session.graphs}
    loads = {g: [n for n in calls[g] if "inductor_seeds" in str(n.target)] for g in calls}
    assert len(loads["forward"]) == 1 and not loads["backward"]
    again = [n for n in calls["backward"] if "inductor_random" in str(n.target)]
    assert how == "plain" or again, "nothing was computed again: the test shows nothing"


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_draws_of_torchs_generator_are_not_drawn_again_either(codegen):
    """What stays with torch's generator has no seed from which it could be computed again."""

    def program(x):
        return (F.dropout(x, 0.3) * torch.rand(8, 8) * torch.rand(8, 8, dtype=torch.float64)).sum()

    x = torch.rand(8, 8).add(0.5).requires_grad_()
    options = {"fallback_random": True, "codegen": codegen}
    for budget in (0.0, 0.5):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            x.grad = None
            loss = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, options=options)(x)
            loss.backward()
        assert torch.allclose((x.grad * x).sum(), loss.float(), rtol=1e-4)


# ---- eager's stream ----


STREAM = {
    "rand": lambda x: (torch.rand_like(x), torch.rand(3, 5)), "randn": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 100, (64,)), "randperm": lambda x: torch.randperm(64),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 2), "normal": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential": lambda x: torch.empty_like(x).exponential_(), "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli_p": lambda x: torch.empty_like(x).bernoulli_(0.3), "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True), "multinomial": lambda x: torch.multinomial(x, 5),
    "several": lambda x: (F.dropout(x, 0.4) + torch.rand_like(x), torch.randn(7), torch.randint(0, 9, (7,))),
}  # fmt: skip


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize("name", STREAM)
def test_fallback_random_is_eagers_stream(name, codegen):
    program, x = STREAM[name], torch.rand(64)
    options = {"fallback_random": True, "codegen": codegen}
    run = torch.compile(program, backend=triptych.compile_fx, fullgraph=True, options=options)
    for seed in (1, 2):
        torch.manual_seed(seed)
        wanted = program(x), program(x)
        torch.manual_seed(seed)
        got = run(x), run(x)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
