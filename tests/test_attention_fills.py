"""What masks fill in: a finite number has weight beside scores that are as low, and -inf may become NaN."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

S = 6


def filled(fill):
    return lambda q, k, v, m: (q @ k.mT).masked_fill(m, fill).softmax(-1) @ v


def chosen(q, k, v, m):
    return torch.where(m, torch.full((), -1e4), q @ k.mT).softmax(-1) @ v


def causal(q, k, v):
    return (q @ k.mT).masked_fill(torch.ones(S, S).tril() == 0, -1e4).softmax(-1) @ v


def gated(q, k, v):
    b = torch.ones(S, S).tril()
    return (q @ k.mT * b - 1e4 * (1 - b)).softmax(-1) @ v


def added_triangle(q, k, v):
    return (q @ k.mT + (torch.ones(S, S).tril() == 0) * -1e4).softmax(-1) @ v


def halved(q, k, v, m):
    return ((q @ k.mT).masked_fill(m, -1e4) / 2).softmax(-1) @ v


def bias_after(q, k, v, m, b):
    return ((q @ k.mT).masked_fill(m, -1e4) + b).softmax(-1) @ v


def bias_before(q, k, v, m, b):
    return (q @ k.mT + b).masked_fill(m, -1e4).softmax(-1) @ v


def two_fills(q, k, v, m, n):
    return (q @ k.mT).masked_fill(m, -1e4).masked_fill(n, -2e4).softmax(-1) @ v


def minus_infinity_and_a_number(q, k, v, m, n):
    return (q @ k.mT).masked_fill(n, -math.inf).masked_fill(m, -1e4).softmax(-1) @ v


def zeros_after(q, k, v, m):
    return (q @ k.mT).masked_fill(m, -1e4).softmax(-1).masked_fill(m, 0) @ v


def sink(q, k, v, m, column):
    return torch.cat([(q @ k.mT).masked_fill(m, -1e4), column], -1).softmax(-1)[..., :-1] @ v


def shifted(q, k, v, m):
    return (q @ k.mT + 3e4).masked_fill(m, -1e4).softmax(-1) @ v


def own_maximum_first(q, k, v, m):
    s = q @ k.mT
    return (s - s.amax(-1, True)).masked_fill(m, -1e4).softmax(-1) @ v


def inputs(size, dtype=torch.float32):
    """Queries and keys with products of about -size, and values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, S, 8, generator=generator) for _ in range(3))
    q, k = q.abs() + 0.5, -k.abs() - 0.5
    factor = (size / (q @ k.mT).abs().mean()) ** 0.5
    return [x.to(dtype).requires_grad_() for x in (q * factor, k * factor, v)]


def masks():
    generator = torch.Generator().manual_seed(1)
    pairs = torch.rand(2, 1, S, S, generator=generator) > 0.5
    pairs[:, :, 0] = True  # a query without a key
    keys, queries = (torch.rand(2, 1, *shape, generator=generator) > 0.5 for shape in ((1, S), (S, 1)))
    return {"pairs": pairs, "keys": keys, "queries": queries}


MASKS = masks()
BIAS = torch.randn(1, 2, S, S, generator=torch.Generator().manual_seed(2)) * 3
PROGRAMS = {
    **{f"-1e4 of {name}": (filled(-1e4), mask) for name, mask in MASKS.items()},
    "-1e9": (filled(-1e9), MASKS["pairs"]),
    "lowest": (filled(torch.finfo(torch.float32).min), MASKS["pairs"]),
    "-inf": (filled(-math.inf), MASKS["pairs"]),
    "by where": (chosen, MASKS["pairs"]),
    "causal": (causal,),
    "gated": (gated,),
    "added triangle": (added_triangle,),
    "halved": (halved, MASKS["pairs"]),
    "bias after": (bias_after, MASKS["pairs"], BIAS),
    "bias before": (bias_before, MASKS["keys"], BIAS),
    "two fills": (two_fills, MASKS["pairs"], MASKS["keys"]),
    "-inf and a number": (minus_infinity_and_a_number, MASKS["keys"], MASKS["pairs"]),
    "zeros after": (zeros_after, MASKS["pairs"]),
    "zeros after, of keys": (zeros_after, MASKS["keys"]),
    "sink": (sink, MASKS["pairs"], BIAS[..., :1].expand(2, 2, S, 1).clone()),
}


def results(program, given):
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    (result,) = program(*given)
    if not result.requires_grad:
        return [result]
    result.backward(torch.ones_like(result).tril())
    return [result.detach(), *(x.grad for x in given if x.requires_grad)]


def check(program, given, options=None, tolerance=1e-4):
    """Values and gradients as before; was it fused?"""
    torch._dynamo.reset()
    gm, given = capture_torch(program, given, False)
    original = copy.deepcopy(gm)
    tally = run_pass(FuseAttention, gm, options=options)
    for want, got in zip(results(original, given), results(gm, given)):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    return gm, tally


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("size", [10.0, 2e4, 4e4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_fills_weigh_what_they_weigh_in_eager(name, size, train):
    program, *rest = PROGRAMS[name]
    given = inputs(size)
    # the backward kernels keep the logarithm of a sum: in float32 a number of this size is rounded by 1e-3
    tolerance = 2e-3 if train and size > 10 else 1e-4
    _, tally = check(program, [x.detach().requires_grad_(train) for x in given] + rest, tolerance=tolerance)
    assert tally.fired["fuse_attention"] == 1, tally.declines


@pytest.mark.parametrize("program", [shifted, own_maximum_first], ids=lambda f: f.__name__)
def test_a_fill_of_shifted_scores_is_left_alone(program):
    """What was added to all scores of a row is left out: a fill would be compared with other numbers."""
    _, tally = check(program, [*inputs(4e4), MASKS["pairs"]])
    assert any("shifted" in d.reason for d in tally.declines.values())


@pytest.mark.parametrize("dtype, fill", [(torch.float16, -1e4), (torch.float16, -65504.0), (torch.bfloat16, -1e4)])
def test_half_precision(dtype, fill):
    given = [x.detach() for x in inputs(3e4, dtype)]
    _, tally = check(filled(fill), [*given, MASKS["pairs"]], tolerance=2e-2)
    assert tally.fired["fuse_attention"] == 1


def calls(gm):
    return [n for n in gm.graph.nodes if "scaled_dot_product_attention" in str(n.target)]


def test_known_scores_make_a_plain_mask():
    gm, _ = check(causal, inputs(10.0), {"fuse_attention.lowest_score": -4e3})
    assert calls(gm)[0].kwargs.get("is_causal") is True
    gm, _ = check(filled(-1e4), [*inputs(10.0), MASKS["keys"]], {"fuse_attention.lowest_score": -4e3})
    assert calls(gm)[0].kwargs["attn_mask"].meta["example_value"].dtype == torch.bool


def test_nothing_is_taken_for_granted_where_that_is_asked_for():
    given = [x.detach() for x in inputs(4e9)]
    _, tally = check(filled(-1e9), [*given, MASKS["pairs"]], {"fuse_attention.lowest_score": -math.inf})
    assert tally.fired["fuse_attention"] == 1


def twice_less_once(q, k, v, m):
    s = (q @ k.mT).masked_fill(m, -math.inf)
    return (s * 2 - s).softmax(-1) @ v


def times_a_tensor(q, k, v, m, factor):
    return ((q @ k.mT).masked_fill(m, -math.inf) * factor).softmax(-1) @ v


def plus_a_tensor(q, k, v, m, bias):
    return ((q @ k.mT).masked_fill(m, -math.inf) + bias).softmax(-1) @ v


def doubled_lowest(q, k, v, m):
    return ((q @ k.mT).masked_fill(m, torch.finfo(torch.float32).min) * 2).softmax(-1) @ v


FACTOR = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5, 1.0])
INFINITE = torch.zeros(S, S).index_fill(1, torch.tensor([2]), math.inf)
BECOMES_NAN = {
    "s * 2 - s": (twice_less_once, MASKS["keys"]),
    "times zero or less, by key": (times_a_tensor, MASKS["pairs"], FACTOR),
    "times zero or less, by query": (times_a_tensor, MASKS["pairs"], FACTOR[:, None]),
    "plus infinity": (plus_a_tensor, MASKS["pairs"], INFINITE),
    "minus -inf": (plus_a_tensor, MASKS["keys"], -INFINITE.mT.mul(-1)),
    "NaN added": (plus_a_tensor, MASKS["pairs"], INFINITE * 0),
    "lowest, doubled": (doubled_lowest, MASKS["pairs"]),
}


@pytest.mark.parametrize("name", BECOMES_NAN)
def test_what_becomes_nan_in_eager_becomes_nan(name):
    program, *rest = BECOMES_NAN[name]
    given = [x.detach() for x in inputs(5.0)]
    assert program(*given, *rest).isnan().any()
    check(program, [*given, *rest])


def by_logarithm(scores):
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))


LOST = {
    "filled": lambda s, m: s.masked_fill(m, torch.finfo(s.dtype).min),
    "filled by less": lambda s, m: s.masked_fill(m, -5e4),
    "chosen": lambda s, m: torch.where(m, torch.full((), -1e9), s),
    "added": lambda s, m: s + m.to(s.dtype) * -1e9,
    "added with a factor that is not known": lambda s, m: s + (m * s[:1, :1, :1].sign().abs()) * -1e9,
    "filled, then viewed": lambda s, m: s.masked_fill(m, -1e9).view(1, *s.shape),
    "cut off": lambda s, m: s.masked_fill(m, -math.inf).clamp(min=torch.finfo(s.dtype).min),
    "shifted": lambda s, m: s + 1e7,
}
NOT_LOST = {
    "as it is": lambda s, m: s * 0.35,
    "shifted a little": lambda s, m: s + 3.0,
    "filled with -inf": lambda s, m: s.masked_fill(m, -math.inf),
    "each row keeps a score": lambda s, m: s.masked_fill(torch.ones(S, S).triu(1) == 1, -1e9),
    "each row keeps a score, of those that are chosen": lambda s, m: torch.where(torch.ones(S, S).tril() == 1, s, -1e9),
    "each row keeps a score, to which is added": lambda s, m: s + torch.where(torch.ones(S, S).tril() == 1, 0.0, -1e9),
}


@pytest.mark.parametrize("name", [*LOST, *NOT_LOST])
def test_a_logarithm_that_is_lost_beside_a_fill(name):
    """A row in which logsumexp rounds to its only number has 1 for each probability, and not 1 / n."""
    change = {**LOST, **NOT_LOST}[name]
    program = lambda q, k, v, m: (by_logarithm(change(q @ k.mT, m)) @ v).view(q.shape)  # noqa: E731
    q, k, v = (torch.randn(2, S, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    m = torch.zeros(2, S, S, dtype=torch.bool)
    m[0, 1] = name != "filled with -inf"
    m[1, :, 2:] = True
    gm, given = capture_torch(program, [q, k, v, m])
    tally = run_pass(FuseAttention, gm)
    assert tally.fired["fuse_attention"] == (name in NOT_LOST)
    if name in LOST:
        assert any("lost in logsumexp" in decline.reason for decline in tally.declines.values())
    torch.testing.assert_close(gm(*given)[0], program(q, k, v, m))


@pytest.mark.parametrize("dtype, number, fuses", [
    (torch.float32, 127.0, 1), (torch.float32, 3e6, 0), (torch.float64, 3e6, 1), (torch.float64, 1e12, 0),
    (torch.bfloat16, 3.0, 1), (torch.bfloat16, 500.0, 0),
])  # fmt: skip
def test_a_number_added_to_all_scores_rounds_them(dtype, number, fuses):
    program = lambda q, k, v: (q @ k.mT - number).softmax(-1) @ v  # noqa: E731
    q, k, v = (torch.randn(2, S, 8, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))
    gm, given = capture_torch(program, [q, k, v])
    tally = run_pass(FuseAttention, gm)
    assert tally.fired["fuse_attention"] == fuses
    assert fuses or any("shifted by" in decline.reason for decline in tally.declines.values())
