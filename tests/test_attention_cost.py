"""An attention is fused where that is quicker, as modelled or as timed: on a GPU with an explicit mask, and on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

import triptych
from triptych.attention import cost
from triptych.cost import measure
from triptych.cost.device import USUAL
from triptych.cost.timing import seconds_on_cpu
from triptych.explaining.page_data import report_data
from triptych.ir.program import Program
from triptych.pre_grad.fuse_attention import FuseAttention
from triptych.testing.check import run_pass

BOOLEAN, BIAS = ((2, 1, 6, 6), (36, 36, 6, 1), torch.bool), ((2, 4, 6, 6), (0, 0, 6, 1), torch.float32)


def site(mask, trains=False, mask_trains=False, rows=6):
    shape, strides, dtype = mask
    operands = [(2, 4, rows, 8)] * 3
    kind = {"is_causal": False, "dtype": torch.float32, "device": torch.device("cpu"), "dropout": 0.0}
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
    kind = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "dropout": 0.0, "mask_trains": False, "is_causal": False}
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


def test_a_short_attention_on_a_cpu_is_fused_without_asking(monkeypatch):
    monkeypatch.setattr(cost._Site, "timed", lambda self: pytest.fail("the difference would be a few microseconds"))
    inputs = [*(torch.randn(2, 4, 6, 8) for _ in range(3)), torch.randn(6, 6)]
    program = lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v  # noqa: E731
    explanation = triptych.explain(program, *inputs, options={"codegen": "eager"})
    assert explanation.runs_of("fuse_attention")[0].fired["fuse_attention"] == 1


# ---- on a CPU ----


def on_cpu(rows, heads=12, batch=1, dtype=torch.float32, trains=False):
    """Seconds as modelled for one core, apart and fused."""
    operands = [(batch, heads, rows, 64)] * 3
    kind = {"is_causal": False, "dtype": dtype, "device": torch.device("cpu"), "dropout": 0.0, "mask_trains": False}
    return cost._Site(*operands, None, (), None, 0, **kind, trains=trains).modelled_on_cpu()


@pytest.mark.parametrize("trains, rows, is_fused", [(False, 16, False), (False, 512, True), (True, 128, False), (True, 1024, True)])
def test_on_a_cpu_the_kernel_gains_where_scores_leave_the_cache(trains, rows, is_fused):
    apart, fused = on_cpu(rows, batch=8 if rows < 100 else 1, trains=trains)
    assert (fused < apart) == is_fused


def test_times_depend_on_the_precision_of_products(monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "can_measure", lambda *_: True)
    monkeypatch.setattr(cost, "measured_in_turns", lambda device, *questions: asked.append([q for q, _ in questions]))
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    try:
        for settings.fp32_precision in ("ieee", "bf16"):
            site(BOOLEAN).timed()
    finally:
        settings.fp32_precision = before
    assert not {*asked[0]} & {*asked[1]}


def by_hand(q, k, v):
    return (q @ k.mT / 8).softmax(-1) @ v


@pytest.mark.parametrize(
    "dtype, tune, times, is_fused",
    [
        (torch.bfloat16, "unsure", (2e-3, 9e-3), False),  # a CPU with instructions for bfloat16
        (torch.bfloat16, "unsure", (9e-3, 2e-3), True),
        (torch.bfloat16, "off", (9e-3, 2e-3), False),  # by the model the gain is too small
        (torch.float32, "unsure", (2e-3, 9e-3), False),
        (torch.float32, "unsure", None, True),
    ],
)
def test_on_a_cpu_both_ways_are_timed(dtype, tune, times, is_fused, monkeypatch):
    monkeypatch.setattr(cost._Site, "timed", lambda self: times)
    inputs = [torch.randn(1, 12, 256, 64, dtype=dtype) for _ in range(3)]
    explanation = triptych.explain(by_hand, *inputs, options={"codegen": "eager", "tune": tune})
    (record,) = explanation.runs_of("fuse_attention")
    assert record.fired["fuse_attention"] == is_fused


def with_dropout(q, k, v, bias):
    return torch.dropout((q @ k.mT / 8).softmax(-1), 0.1, True) @ v


def with_bias(q, k, v, bias):
    return (q @ k.mT / 8 + bias).softmax(-1) @ v


@pytest.mark.parametrize("program, codegen", [(with_dropout, "inductor"), (with_bias, "eager")])
@pytest.mark.parametrize("rows, is_fused", [(8, True), (256, False)])
def test_without_a_kernel_on_a_cpu_products_stay(program, codegen, rows, is_fused):
    """Torch would compute them itself, and those of bfloat16 in float32."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in [(1, 2, rows, 64)] * 3 + [(rows, rows)]]
    explanation = triptych.explain(program, *inputs, train=True, options={"codegen": codegen})
    (record,) = explanation.runs_of("fuse_attention")
    assert record.fired["fuse_attention"] == is_fused
    assert is_fused or "no kernel" in record.declines[0].reason


def test_under_autocast_the_narrow_dtype_is_timed(monkeypatch):
    asked = []
    monkeypatch.setattr(cost._Site, "timed", lambda self: asked.append(self.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        triptych.explain(by_hand, *(torch.randn(1, 12, 256, 64) for _ in range(3)), options={"codegen": "eager"})
    assert asked == [torch.bfloat16]


def test_nothing_is_timed_under_autocast(monkeypatch, tmp_path):
    """Otherwise the times of float32, which are stored for other programs, would be those of bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, dtypes = torch.randn(4, 4), set()
    with torch.autocast("cpu", torch.bfloat16):
        measure.measured("a product", x.device, lambda: lambda: dtypes.add((x @ x).dtype))
    assert dtypes == {torch.float32}


def test_long_work_is_timed_less_often():
    calls = []
    work = lambda: calls.append(sum(range(30_000)))  # noqa: E731
    assert seconds_on_cpu(work, most=1e-6) > 0 and len(calls) == 1
    calls.clear()
    assert seconds_on_cpu(work, least=0.0, most=10.0) > 0 and len(calls) == 2 + 5


def test_what_a_cpu_adds_to_its_kernel_counts():
    plain, wide = ([(8, 12, rows, 64)] * 3 for rows in (32, 64))
    kind = {"is_causal": False, "dtype": torch.float32, "dropout": 0.0, "mask_trains": False, "trains": False}
    times = [cost._Site(*operands, None, (), None, 0, **kind, device=torch.device(device)).nan_rows
             for operands, device in ((plain, "cpu"), (wide, "cpu"), (wide, "cuda"))]  # fmt: skip
    assert 0 < times[0] < times[1] and times[2] == 0


def test_what_a_cpu_is_timed_with_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "HOST_BYTES", 1 << 20)
    with torch.no_grad():
        before, after = cost._Site((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16), None, (), None, 0, True, torch.bfloat16,
                                   torch.device("cpu"), 0.0, True, False).timed()  # fmt: skip
    assert 0 < before < 1 and 0 < after < 1


def test_a_short_attention_on_a_cpu_is_fused_whatever_it_costs_and_reports_do_not_list_that():
    def attention(q, k, v):
        return (q @ k.mT * 0.5).softmax(-1) @ v

    operands = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    explanation = triptych.explain(attention, *operands)
    (decision,) = [d for record in explanation.passes for d in record.decisions]
    assert decision.rule == "fuse_attention" and decision.negligible and decision.after > decision.before > 0
    assert str(decision).startswith("too short to matter: ") and str(decision).endswith(" after, modelled")
    assert "Costs of what was done" not in str(explanation) and "too short to matter" not in str(explanation)
    assert not any(record["decisions"] for record in report_data(explanation)["core"]["passes"])
    told = [decision for record in explanation.to_dict()["passes"] for decision in record["decisions"]]
    assert [decision["negligible"] for decision in told] == [True]  # data have all


# ---- on a GPU without a mask ----


def on_gpu(monkeypatch, batch, heads, rows, width, dtype=torch.bfloat16, trains=False, times=None, **options):
    """What is decided about an attention without a mask on an H200 that need not be there: did it fire, and why."""
    monkeypatch.setattr(cost._Site, "timed", lambda self: times)
    gm = torch.fx.symbolic_trace(by_hand)
    with FakeTensorMode():
        Program(gm, [torch.empty(batch, heads, rows, width, dtype=dtype, device="cuda")] * 3)
        tally = run_pass(FuseAttention, gm, options=options, is_inference=not trains)
    (told,) = tally.decisions or [d.reason for d in tally.declines.values()]
    return bool(tally.fired["fuse_attention"]), str(told)


def test_the_model_of_the_kernel_without_a_mask_is_what_was_measured():
    operands, kind = [(4, 16, 2048, 64)] * 3, {"dtype": torch.bfloat16, "device": torch.device("cuda"), "dropout": 0.0}
    sites = [cost._Site(*operands, None, (), None, 0, causal, **kind, trains=False, mask_trains=False) for causal in (False, True)]
    (before, whole), (_, causal) = (one.modelled() for one in sites)
    assert whole == pytest.approx(0.161e-3, rel=0.2) and before == pytest.approx(0.783e-3, rel=0.3)
    assert causal < 0.6 * whole


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("sizes", [(4, 16, 2048, 64), (64, 12, 197, 64), (8, 12, 512, 64), (2, 4, 6, 8)])
def test_without_a_mask_a_gpu_fuses_and_tells_the_costs(sizes, trains, monkeypatch):
    fires, told = on_gpu(monkeypatch, *sizes, trains=trains)
    assert fires and " us instead of " in told and "too short" not in told  # faster, however short


@pytest.mark.parametrize("times, fires", [((9e-4, 3e-4), True), ((3e-4, 9e-4), False), (None, True)])
def test_without_a_mask_in_float32_a_measurement_decides(times, fires, monkeypatch):
    fired, told = on_gpu(monkeypatch, 8, 12, 1024, 64, torch.float32, times=times)
    assert fired is fires and told.endswith("modelled" if times is None else "measured")
    assert on_gpu(monkeypatch, 8, 12, 1024, 64, torch.float32, times=times, tune="off")[0]


def test_many_short_windows_without_a_mask_are_timed(monkeypatch):
    """The model cannot tell where each head has little to do; what the device says is done and told."""
    for times, fires in (((2e-4, 9e-4), False), ((9e-4, 2e-4), True)):
        fired, told = on_gpu(monkeypatch, 4096, 3, 49, 32, times=times)
        assert fired is fires and told.endswith("measured")
