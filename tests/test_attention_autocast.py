"""Attention under autocast, where products are rounded and what is added to them is not."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from triptych.ir.text import text
from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

from .test_attention import as_double, compare, in_double, run_with_gradients, run_with_noise

B, H, S, D = 2, 4, 6, 8


def masked(lowest: float, dead: bool = False) -> torch.Tensor:
    keep = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[..., 0] = True
    if dead:
        keep[..., -1, :] = False
    return torch.zeros(B, 1, S, S).masked_fill(~keep, lowest)


def added(q, k, v, bias):
    return (q @ k.mT * 0.35 + bias).softmax(-1) @ v


def added_in_place(q, k, v, bias):
    scores = q @ k.mT * 0.35
    scores += bias
    return scores.float().softmax(-1).type_as(scores) @ v


def added_twice(q, k, v, bias):
    slopes = torch.arange(S) * torch.arange(1, H + 1).view(H, 1, 1) * 0.0371
    return (q @ k.mT * 0.35 + slopes + bias).softmax(-1) @ v


def softmax_apart(q, k, v, bias):
    scores = q @ k.mT * 0.35 + bias
    with torch.autocast("cpu", enabled=False):
        weights = scores.float().softmax(-1)
    return weights @ v


def narrow_already(q, k, v, bias):
    return added(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias)


LOWEST = torch.finfo(torch.float32).min
BIASES = {
    "low": masked(LOWEST),
    "cut": masked(-math.inf),
    "little": masked(-1e4, dead=True),
    "bias": torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(4)) * 3,
    "sunk": masked(LOWEST, dead=True),
    "sunk_less": masked(-1e9, dead=True),
    "dead": masked(-math.inf, dead=True),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("program", [added, added_in_place, added_twice, softmax_apart, narrow_already])
@pytest.mark.parametrize("train", [False, True])
def test_bias_in_float32(program, bias, train):
    """Fused, and as exact as before: rows that are masked out entirely are too."""
    if train and bias == "sunk_less":
        pytest.skip("in double precision, which it is compared with, scores are not lost in such numbers")
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, H, S, D, generator=generator).requires_grad_(train) for _ in range(3)] + [BIASES[bias]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gm, args = capture_torch(program, inputs)
        original = copy.deepcopy(gm)
        run_pass(NormalizationPassAten, gm)
        tally = run_pass(FuseAttention, gm)
        assert tally.fired["fuse_attention"] == 1, f"{[d.reason for d in tally.declines.values()]}\n{text(gm)}"
        before, _ = run_with_gradients(original, args)
        noisy = list(run_with_noise(original, args))
        after, _ = run_with_gradients(gm, args)
    exact, _ = run_with_gradients(in_double(original), [as_double(x) for x in args])
    for got, right, *wants in zip(after, exact, before, *noisy):
        compare(program.__name__, wants, got, right, torch.bfloat16)


def test_products_in_float32_stay_so():
    """Autocast would round what was multiplied where it was switched off."""

    def program(q, k, v):
        with torch.autocast("cpu", enabled=False):
            weights = (q @ k.mT).softmax(-1)
        return weights @ v

    inputs = [torch.randn(B, H, S, D) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gm, _ = capture_torch(program, inputs)
        tally = run_pass(FuseAttention, gm)
    assert not tally.fired["fuse_attention"]
