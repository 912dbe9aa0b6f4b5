"""On a GPU an attention with an explicit mask is fused where that is quicker, as modelled or as timed."""

from __future__ import annotations

import math

import pytest
import torch

import triptych
from triptych.attention import cost
from triptych.cost.device import USUAL

BOOLEAN, BIAS = ((2, 1, 6, 6), (36, 36, 6, 1), torch.bool), ((2, 4, 6, 6), (0, 0, 6, 1), torch.float32)


def site(mask, trains=False, mask_trains=False, rows=6):
    shape, strides, dtype = mask
    operands = [(2, 4, rows, 8)] * 3
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "dropout": 0.0}
    return cost._Site(*operands, shape, strides, dtype, 144, **kind, trains=trains, mask_trains=mask_trains)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("mask", [BOOLEAN, BIAS])
def test_what_is_timed_runs(mask, trains):
    timed = site(mask, trains, trains and mask is BIAS)
    with torch.no_grad():
        for work in (timed._apart(), timed._fused()):
            work()
            work()


def test_the_model_counts_what_is_written():
    """Twice the rows and keys: four times the bytes, where they are what costs."""
    few, many = (site(BOOLEAN, rows=rows).modelled()[0] for rows in (1024, 2048))
    assert 3 < many / few < 5
    assert site(BOOLEAN, trains=True, rows=1024).modelled()[0] > 2 * few


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "windows, heads, rows, width, is_fused",
    [(4096, 3, 49, 32, False), (64, 24, 49, 32, False), (8, 12, 512, 64, True), (2, 4, 6, 8, True)],
    ids=["Swin, first stage", "Swin, last stage", "T5", "tiny"],
)
def test_many_small_windows_are_not_fused(windows, heads, rows, width, is_fused, trains, monkeypatch):
    """As modelled for an H200: a kernel spends a fixed time on each window and head."""
    monkeypatch.setattr(cost, "device_model", lambda device: USUAL)
    operands, mask = [(windows, heads, rows, width)] * 3, (windows, heads, rows, rows)
    kind = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "dropout": 0.0, "mask_trains": False}
    modelled = cost._Site(*operands, mask, (0, rows * rows, rows, 1), torch.bfloat16, 0, **kind, trains=trains)
    before, after = modelled.modelled()
    assert (after < before) == is_fused


@pytest.mark.parametrize("times, is_fused", [((9e-6, 3e-6), True), ((3e-6, 9e-6), False), (None, True)])
def test_the_quicker_way_is_taken(times, is_fused, monkeypatch):
    def program(q, k, v, mask):
        return (q @ k.mT / 8**0.5).masked_fill(mask, -math.inf).softmax(-1) @ v

    asked = []

    def require_quicker(m, plan):
        assert cost._Site.of(plan).mask == (1, 1, 6, 6)
        m.pays(10e-6, 8e-6, measure=lambda: asked.append(plan) or times)

    monkeypatch.setattr("triptych.attention.fuse.require_quicker", require_quicker)
    inputs = [*(torch.randn(2, 4, 6, 8) for _ in range(3)), torch.ones(6, 6).triu(1).bool()]
    explanation = triptych.explain(program, *inputs, options={"codegen": "eager"})
    (record,) = explanation.runs_of("fuse_attention")
    assert asked and record.fired["fuse_attention"] == is_fused
    told = record.decisions if is_fused else [d.reason for d in record.declines]
    assert str(told[0]).endswith("modelled" if times is None else "measured")


def test_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(cost._Site, "modelled", lambda self: pytest.fail("a CPU has one kernel for both"))
    inputs = [*(torch.randn(2, 4, 6, 8) for _ in range(3)), torch.randn(6, 6)]
    program = lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v  # noqa: E731
    explanation = triptych.explain(program, *inputs, options={"codegen": "eager"})
    assert explanation.runs_of("fuse_attention")[0].fired["fuse_attention"] == 1
