"""When a graph computes and when it communicates: the modelled timeline, in figures, in the report and on its page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import triptych
from tests.ranks import run_ranks
from triptych.communication.costs import collective_cost, compute_seconds
from triptych.communication.example_group import (
    NAME,
    all_gather,
    all_gather_along,
    all_reduce,
    register,
    wait,
)
from triptych.communication.timeline import COMMUNICATION, COMPUTATION, timeline
from triptych.explaining.page_data import report_data
from triptych.ir.collectives import collectives
from triptych.post_grad.micro_pipeline_tp_pass import MicroPipelineTpPass
from triptych.testing.capture import capture_aten
from triptych.testing.check import run_pass

FRONT_END = Path(__file__).parent.parent / "report"


def captured(program, *inputs):
    return capture_aten(program, inputs)[0]


def test_a_wait_holds_the_computation_until_the_data_is_there():
    """x is reduced while y is multiplied; what needs both comes last."""

    def program(x, y):
        started = all_reduce(x)
        y = y @ y
        return wait(started).sin() + y

    gm = captured(program, torch.ones(256, 256), torch.ones(256, 256))
    (found,) = collectives(gm.graph)
    product, sine, total = (
        next(compute_seconds(n) for n in gm.graph.nodes if n.name.startswith(name)) for name in ("mm", "sin", "add")
    )
    reduced = collective_cost(found, "auto").seconds
    lanes = timeline(gm.graph)
    assert lanes.collectives == {"all_reduce": 1}
    assert lanes.communication == pytest.approx(reduced)
    assert lanes.computation == pytest.approx(product + sine + total)
    assert lanes.seconds == pytest.approx(max(product, reduced) + sine + total)
    assert lanes.exposed == pytest.approx(max(0.0, reduced - product))
    assert [(i.lane, i.what, i.nodes) for i in lanes.intervals] == [
        (COMMUNICATION, "all_reduce", 1), (COMPUTATION, "mm", 1), (COMPUTATION, "add", 2),
    ]  # fmt: skip


def test_collectives_run_one_after_the_other():
    gm = captured(lambda x, y: (all_reduce(x), all_gather(y)), torch.ones(64), torch.ones(64))
    first, second = timeline(gm.graph).intervals
    assert first.start == 0 and second.start == pytest.approx(first.seconds)


def test_a_fused_operator_keeps_both_lanes_busy():
    gm = captured(lambda x, w: all_gather_along(x) @ w, torch.ones(512, 512), torch.ones(512, 512))
    before = timeline(gm.graph)
    run_pass(MicroPipelineTpPass, gm)
    after = timeline(gm.graph)
    computed, sent = sorted(after.intervals, key=lambda interval: interval.lane, reverse=True)
    assert computed.start == sent.start == 0
    assert after.collectives == {"fused_all_gather_matmul": 1}
    assert after.seconds == pytest.approx(max(computed.seconds, sent.seconds))
    assert after.seconds < before.seconds


def test_a_graph_that_does_not_communicate_has_none():
    assert timeline(captured(lambda x: x + 1, torch.ones(4)).graph) is None


def six_layers(x, *weights):
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    for weight in weights:
        x = torch.tanh(x @ wait(gather(weight, 2, NAME)).t())
    return x


@pytest.fixture(scope="module")
def explained():
    register()
    options = {"codegen": "eager", "add_passes": ["bucket_all_gather", "overlap_scheduling"]}
    return triptych.explain(six_layers, torch.randn(4, 16), *[torch.randn(8, 16) for _ in range(6)], options=options)


def test_an_explanation_has_both_sides(explained):
    (both,) = explained.timelines
    assert (both.program, both.graph) == (1, "inference")
    assert both.before.collectives == {"all_gather": 6} and both.after.collectives == {"all_gather": 1}
    assert both.after.exposed < both.before.exposed / 2
    data = json.loads(explained.to_json())["timelines"]
    assert data == json.loads(json.dumps([both.to_dict()])) == report_data(explained)["core"]["timelines"]
    text = str(explained)
    assert "inference before   6 all_gather" in text and "inference after    1 all_gather" in text


def test_the_timeline_is_the_same_every_time(explained):
    options = {"codegen": "eager", "add_passes": ["bucket_all_gather", "overlap_scheduling"]}
    torch._dynamo.reset()
    again = triptych.explain(six_layers, torch.randn(4, 16), *[torch.randn(8, 16) for _ in range(6)], options=options)
    assert [both.to_dict() for both in again.timelines] == [both.to_dict() for both in explained.timelines]


def test_an_explanation_without_collectives_has_no_timeline():
    explanation = triptych.explain(lambda x: x.sin(), torch.ones(3), options={"codegen": "eager"})
    assert explanation.timelines == [] and "Communication" not in str(explanation)


def test_a_reader_sees_the_picture(explained, tmp_path):
    """`report/test/ranks.mjs` has the steps."""
    chromium, node = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("node")
    if chromium is None or node is None or not (FRONT_END / "node_modules" / "playwright-core").is_dir():
        pytest.skip("needs chromium, node and playwright-core")
    path = explained.to_html(tmp_path / "page.html")
    command = [node, "test/ranks.mjs", str(path), chromium]
    done = subprocess.run(command, cwd=FRONT_END, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_work_of_a_timeline_does_not_depend_on_the_number_of_ranks():
    """On the fake process group: as many calls with 1,024 ranks as with 8, and as many intervals."""
    ((few, many),) = run_ranks("fake_timeline", ranks=1)
    assert few == many
    assert few["calls"] > 100
