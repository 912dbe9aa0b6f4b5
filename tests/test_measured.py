"""Measured times: every launch is attributed, sums are right, and the program is afterwards as it was."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections import Counter

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import triptych
from triptych.cli import main
from triptych.errors import TriptychError
from triptych.explaining import gpu_times, probe
from triptych.explaining.comparison import figures
from triptych.explaining.explain import run_once
from triptych.explaining.explanation import Explanation
from triptych.explaining.launches import Launch, launches
from triptych.explaining.page_data import report_data
from triptych.explaining.profile import NOT_ATTRIBUTED, Moment, Subject, profile_on_cpu, profile_on_gpu
from triptych.ir.text import text

EAGER = {"codegen": "eager"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


class Net(nn.Module):
    """It draws, has a buffer that a step writes, and an attribute that it counts with."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.batch = nn.BatchNorm1d(width)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        for block in self.blocks:
            x = block(x)
        return self.batch(x)


def state_of(model):
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    return tensors, [None if p.grad is None else p.grad.clone() for p in model.parameters()], model.steps


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 16, requires_grad=True)
    next(model.parameters()).grad = torch.full((16,), 3.0)
    before, drawn = state_of(model), torch.get_rng_state()
    explanation = triptych.explain(model, x, train=True, stock=True, profile=True)
    return explanation, before, state_of(model), (drawn, torch.get_rng_state()), x


def test_the_program_is_as_it_was(run):
    _, (tensors, gradients, steps), (tensors_after, gradients_after, steps_after), (drawn, drawn_after), x = run
    assert steps == steps_after == 0 and torch.equal(drawn, drawn_after) and x.grad is None
    assert all(torch.equal(value, tensors_after[name]) for name, value in tensors.items())
    assert [g is None for g in gradients_after] == [g is None for g in gradients]
    assert torch.equal(gradients[0], gradients_after[0])


def test_sums_are_right(run):
    for explanation in (run[0], run[0].stock):
        profile = explanation.profile
        assert profile.device == "cpu" and profile.waiting_seconds is None and profile.rounds > 0
        assert 0 < profile.kernel_seconds <= profile.wall_seconds == profile.total_seconds
        launched = sum(one.seconds for one in profile.launches)
        assert launched == pytest.approx(profile.kernel_seconds)
        assert launched + profile.not_attributed == pytest.approx(profile.wall_seconds)
        for parts in (profile.regions, profile.modules):
            assert sum(part.seconds for part in parts) == pytest.approx(profile.wall_seconds)
            assert parts[-1].name == NOT_ATTRIBUTED and parts[-1].seconds == profile.not_attributed
            assert sum(part.launches for part in parts) == len(profile.launches)


def test_every_launch_of_the_generated_code_is_timed_once(run):
    for explanation in (run[0], run[0].stock):
        (session,) = explanation.sessions
        expected = [launch for graph in session.kernels for launch in launches(session, graph)]
        assert [one.launch for one in explanation.profile.launches] == expected
        assert {one.launch.graph for one in explanation.profile.launches} == {"forward", "backward"}
        assert len(expected) == explanation.kernel_launches
        assert all(one.calls == 1 and one.seconds > 0 for one in explanation.profile.launches)


def test_launches_say_where_they_come_from(run):
    timed = run[0].profile.launches
    products = [one.launch for one in timed if one.launch.cost is not None and one.launch.cost.gemms]
    assert {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"} <= {p.module for p in products}
    assert all(line.startswith("test_measured.py:") for p in products for line in p.sources)
    modules = {part.name: part for part in run[0].profile.modules}
    inside = [part for name, part in modules.items() if name.startswith("blocks.0")]
    if "blocks.0" in modules:
        assert modules["blocks.0"].total == pytest.approx(sum(part.seconds for part in inside))


def test_the_comparison_claims_what_was_measured_and_nothing_else(run):
    explanation = run[0]
    rows = {one.what: one for one in figures(explanation, explanation.stock)}
    step = rows["time of a step (measured)"]
    assert (step.ours, step.theirs) == (explanation.profile.wall_seconds, explanation.stock.profile.wall_seconds)
    assert step.comparable and not rows["time in kernels (estimated)"].comparable
    ratio = explanation.stock.profile.wall_seconds / explanation.profile.wall_seconds
    assert f"a step {ratio:.2f} times as fast (measured)" in " ".join(str(explanation).split())
    estimated = copy.copy(explanation)
    estimated.profile = None
    said = {one.what: one for one in figures(estimated, explanation.stock)}
    assert "measured" not in " ".join(said) and "times as fast" not in str(estimated)
    assert not said["time in kernels (estimated)"].comparable


def test_text_json_and_page_have_the_times(run):
    explanation = run[0]
    assert "Kernels, measured" in str(explanation) and NOT_ATTRIBUTED in str(explanation)
    data = json.loads(explanation.to_json())
    assert len(data["profile"]["launches"]) == len(explanation.profile.launches)
    assert data["stock"]["profile"]["wall_seconds"] == explanation.stock.profile.wall_seconds
    report = report_data(explanation)
    measured = [call["measured"] for call in report["kernels"]["calls"]]
    assert measured == [one.seconds for one in explanation.profile.launches]
    boxes = [box for box in report["core"]["programs"][0]["flow"] if box["key"] == "kernels"]
    assert sum(box["measured"] for box in boxes) == pytest.approx(explanation.profile.kernel_seconds)
    assert report["core"]["profile"]["wall"] == explanation.profile.wall_seconds
    copied = pickle.loads(pickle.dumps(explanation))
    assert copied.profile == explanation.profile and str(copied) == str(explanation)


def test_the_trace_is_one_that_perfetto_reads(run, tmp_path):
    explanation = run[0]
    path = explanation.to_trace(tmp_path / "deep" / "step.json")
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert all(event["ph"] in "MX" and {"pid", "tid", "ts", "name"} <= set(event) for event in events)
    whole = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in whole) and {event["pid"] for event in whole} == {1, 2}
    for pid, one in ((1, explanation), (2, explanation.stock)):
        (step,) = [event for event in whole if event["pid"] == pid and event["cat"] == "step"]
        kernels = [event for event in whole if event["pid"] == pid and event["cat"] == "kernel"]
        assert Counter(e["name"] for e in kernels) == Counter(o.launch.name for o in one.profile.launches)
        assert all(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["dur"] + 1e-3 for e in kernels)
    arguments = [event["args"] for event in whole if event["pid"] == 1 and event["cat"] == "kernel"]
    assert {"blocks.0.up", "blocks.1.down"} <= {a.get("module") for a in arguments}
    assert any("test_measured.py" in a.get("source", "") for a in arguments)


def test_without_a_profile_there_is_no_trace(tmp_path):
    explanation = triptych.explain(lambda x: x.sin(), torch.ones(3), options=EAGER)
    assert explanation.profile is None and json.loads(explanation.to_json())["profile"] is None
    with pytest.raises(TriptychError, match="profile=True"):
        explanation.to_trace(tmp_path / "step.json")
    assert not (tmp_path / "step.json").exists()


# ---- without code generation, and graphs inside a graph ----


def test_nodes_are_timed_one_by_one_without_code_generation():
    net = Net()
    explanation = triptych.explain(net, torch.randn(8, 16), train=True, profile=True, options=EAGER)
    (session,) = explanation.sessions
    for graph in ("forward", "backward"):
        called = [n.name for n in session.runnable[graph].graph.nodes if probe.is_call(n)]
        timed = [one for one in explanation.profile.launches if one.launch.graph == graph]
        assert [one.launch.nodes for one in timed] == [(name,) for name in called]
        assert all(one.calls == 1 and one.seconds > 0 for one in timed)
    assert explanation.kernel_launches == 0 and "Kernels, measured" in str(explanation)
    assert sum(p.seconds for p in explanation.profile.modules) == pytest.approx(explanation.profile.wall_seconds)


class SiluByHand(triptych.Rule):
    """sigmoid(x) * x -> silu(x)"""

    exact = False
    stages = ("pre_grad",)

    def pattern(self, op, x):
        return op.mul(op.sigmoid(x), x)

    def rewrite(self, op, x):
        return op.silu(x)


@pytest.mark.parametrize("train", [False, True])
def test_launches_of_what_a_rule_wrote_before_autograd_name_the_rule(train):
    def program(x, w):
        y = x @ w
        return torch.sigmoid(y) * y

    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    options = {**EAGER, "add_rules": SiluByHand}
    seen = triptych.explain(program, x, w, train=train, profile=True, options=options)
    for graph in ("forward", "backward")[: 1 + train]:
        timed = [one.launch for one in seen.profile.launches if one.launch.graph == graph]
        made = {launch.name: launch.region for launch in timed}
        others = {name for name, region in made.items() if region == ""}
        assert set(made.values()) == {"", "add_rules: silu_by_hand"}
        assert all("mm" in name or "permute" in name for name in others)
        assert "  <- silu_by_hand" in text(seen.graphs[graph])
    names = [part.name for part in seen.profile.regions]
    assert "add_rules: silu_by_hand" in names and "no rule" in names
    listing = next(r for r in seen.passes if r.stage == "post_grad").listing
    assert any(line.rule == "silu_by_hand" for line in listing.latest)


def test_code_is_its_own_again(run):
    explanation = triptych.explain(Net(), torch.randn(8, 16), options=EAGER)
    (session,) = explanation.sessions
    function = type(session.runnable["forward"]).forward
    before = function.__code__
    probed = probe.Probed([session])
    with probed.noting(), pytest.raises(ZeroDivisionError):
        assert function.__code__ is not before and probe.BEGIN in function.__globals__
        raise ZeroDivisionError
    assert function.__code__ is before and probe.BEGIN not in function.__globals__


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos(), (x,)) * 2


def test_launches_in_a_graph_inside_the_graph_are_found_in_it():
    explanation = triptych.explain(Branches(), torch.ones(4, 4), profile=True)
    (session,) = explanation.sessions
    found = launches(session, "forward")
    assert explanation.kernel_launches == len(found)
    products = [launch for launch in found if launch.cost is not None and launch.cost.gemms]
    assert len(products) == 2 and sum(launch.cost.gemms for launch in found if launch.cost) == 2
    calls = {one.launch.number: one.calls for one in explanation.profile.launches}
    assert sorted(calls[launch.number] for launch in products) == [0, 1]  # one branch ran


# ---- what is not known ----


def unmatched(explanation, count):
    """The explanation as if nothing were known of its first launches."""
    (session,) = explanation.sessions
    notes = {graph: dict(nodes) for graph, nodes in session.kernel_nodes.items()}
    for key in list(notes["forward"])[:count]:
        notes["forward"][key] = ["of_no_graph"]
    return Explanation([dataclasses.replace(session, kernel_nodes=notes)], frames=explanation.frames)


def test_what_is_not_known_is_no_zero():
    whole = triptych.explain(lambda x, w: ((x @ w).sin() + 1).softmax(-1), *torch.rand(2, 8, 8), stock=True)
    kernels = whole.kernel_launches
    one = unmatched(whole, 1)
    one.stock = whole.stock
    known = {f.what: f for f in figures(whole, whole.stock)}["read and written by kernels (estimated)"]
    figure = {f.what: f for f in figures(one, one.stock)}["read and written by kernels (estimated)"]
    assert known.unknown == (0, 0) and figure.unknown == (1, 0) and 0 < figure.ours < known.ours
    assert not figure.comparable and "1 launch unknown" in figure.texts()[0] and figure.texts()[0].startswith("at least ")
    assert figure.texts()[0] in " ".join(str(one).split()) and one.kernels_unknown == 1
    data = report_data(one)
    assert [call["bytes"] is None for call in data["kernels"]["calls"]] == [True] + [False] * (kernels - 1)
    (box,) = [box for box in data["core"]["programs"][0]["flow"] if box["key"] == "kernels"]
    assert box["unknown"] == 1 and box["bytes"] == figure.ours

    none = unmatched(whole, kernels)
    none.stock = whole.stock
    figure = {f.what: f for f in figures(none, none.stock)}["read and written by kernels (estimated)"]
    assert figure.ours is None and figure.texts()[0] == "?"
    data = json.loads(none.to_json())
    row = next(row for row in data["comparison"] if row["what"] == "read and written by kernels (estimated)")
    assert row["ours"] is None and row["ours_unknown"] == data["kernels_unknown"] == kernels


# ---- on a GPU: the trace of torch's profiler, by hand ----


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(number, name, generated=True):
    return Launch("forward", number, name, f"{name}()", generated=generated)


ON_GPU = [launch(0, "triton_poi_fused_0"), launch(1, "extern_kernels.mm", False), launch(2, "triton_red_fused_1")]


def one_step(start, shift=0.0):
    number = int(start)
    return [
        event("user_annotation", f"{gpu_times.STEP}{number}", start, 100),
        event("user_annotation", f"{probe.RANGE}0", start + 5, 5),
        event("cuda_driver", "cuLaunchKernel", start + 6, 1, correlation=number + 1),
        event("user_annotation", f"{probe.RANGE}1", start + 12, 10),
        event("cuda_runtime", "cudaLaunchKernel", start + 13, 1, correlation=number + 2),
        event("cuda_runtime", "cudaLaunchKernelExC", start + 16, 1, correlation=number + 3),
        event("cuda_runtime", "cudaMemcpyAsync", start + 30, 1, correlation=number + 4),
        event("cuda_runtime", "cudaLaunchKernel", start + 14, 1, tid=2, correlation=number + 5),
        event("kernel", "triton_poi_fused_0", start + 20, 10 + shift, tid=7, correlation=number + 1, stream=7),
        event("kernel", "gemm", start + 32, 20, tid=7, correlation=number + 2, stream=7),
        event("kernel", "splitKreduce", start + 53, 5, tid=7, correlation=number + 3, stream=7),
        event("gpu_memcpy", "Memcpy DtoD", start + 60, 2, tid=7, correlation=number + 4, stream=7),
        event("kernel", "of another thread", start + 70, 3, tid=9, correlation=number + 5, stream=9),
        event("gpu_user_annotation", f"{probe.RANGE}1", start + 20, 40, tid=7),
    ]


def test_kernels_belong_to_the_launch_in_which_the_host_started_them():
    before = [event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=9), event("kernel", "warm-up", 2, 50, correlation=9)]
    steps = gpu_times.gpu_work({"traceEvents": [*before, *one_step(1000), *one_step(2000, shift=2)]}, ON_GPU)
    assert len(steps) == 2
    assert [(work.launch, work.name) for work in steps[0]] == [
        (0, "triton_poi_fused_0"), (1, "gemm"), (1, "splitKreduce"), (-1, "Memcpy DtoD"), (-1, "of another thread"),
    ]  # fmt: skip
    assert [work.seconds for work in steps[1]] == pytest.approx([12e-6, 20e-6, 5e-6, 2e-6, 3e-6])


def test_two_figures_on_a_gpu():
    """Time in kernels, and time in which the GPU waits for the host."""
    steps = gpu_times.gpu_work({"traceEvents": [*one_step(1000), *one_step(2000, shift=2)]}, ON_GPU)
    subject = Subject(lambda timed: None, [])
    subject.probed.launches = [(1, one) for one in ON_GPU]
    subject.steps = [120e-6, 100e-6]
    subject.rounds = [(0.0, 200e-6, [(0, 5e-6, 10e-6), (1, 12e-6, 22e-6)])]
    profile = profile_on_gpu(subject, steps)
    assert [one.seconds for one in profile.launches] == pytest.approx([10e-6, 25e-6, 0.0])
    assert [one.calls for one in profile.launches] == [1, 1, 0]
    assert profile.kernel_seconds == pytest.approx(40e-6) and profile.waiting_seconds == pytest.approx(60e-6)
    assert profile.not_attributed == pytest.approx(5e-6) and profile.wall_seconds == 100e-6
    assert sum(part.seconds for part in profile.regions) == pytest.approx(profile.kernel_seconds)
    assert profile.step[1] == Moment(1, "gemm", pytest.approx(12e-6), pytest.approx(20e-6), "stream 7")


def test_kernels_of_a_cuda_graph_are_assigned_by_order_and_name():
    def work(*names):
        return [gpu_times.GpuWork(-1, name, index, 1.0, "stream 7") for index, name in enumerate(names)]

    def numbers(*names, launches=ON_GPU):
        return [one.launch for one in gpu_times.by_order(work(*names), launches)]

    assert numbers("triton_poi_fused_0", "gemm", "splitK", "triton_red_fused_1") == [0, 1, 1, 2]
    assert numbers("gemm", "triton_red_fused_1", launches=ON_GPU[1:]) == [0, 1]
    assert numbers("lce_kernel", "gemm", launches=[launch(0, "lce_kernel_4"), ON_GPU[1]]) == [0, 1]
    several = [ON_GPU[0], ON_GPU[1], launch(2, "extern_kernels.bmm", False), launch(3, "triton_red_fused_1")]
    assert numbers("triton_poi_fused_0", "a", "b", "triton_red_fused_1", launches=several) == [0, -1, -1, 3]
    started = [gpu_times.GpuWork(0, "triton_poi_fused_0", 0.0, 1.0, ""), *work("a copy")]
    assert [one.launch for one in gpu_times.by_order(started, ON_GPU)] == [0, -1]


def test_each_part_of_a_step_counts_at_its_best():
    subject = Subject(lambda timed: None, [])
    subject.probed.launches = [(1, one) for one in ON_GPU[:2]]
    subject.steps = [30.0]
    subject.rounds = [
        (0.0, 20.0, [(0, 1.0, 11.0), (1, 12.0, 14.0)]),  # 1 + 10 + 1 + 2 + 6
        (0.0, 20.0, [(0, 8.0, 12.0), (1, 14.0, 19.0)]),  # 8 + 4 + 2 + 5 + 1
        (0.0, 9.0, [(1, 1.0, 2.0)]),  # another way through the program
    ]
    profile = profile_on_cpu(subject)
    assert [one.seconds for one in profile.launches] == [4.0, 2.0] and profile.rounds == 2
    assert profile.wall_seconds == 1 + 4 + 1 + 2 + 1 and profile.not_attributed == 3.0


# ---- the command line ----

FILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
args = (torch.randn(2, 4),)
options = {"codegen": "eager"}
"""


def test_on_the_command_line(tmp_path):
    file, trace = tmp_path / "model.py", tmp_path / "traces" / "step.json"
    file.write_text(FILE)
    result = CliRunner().invoke(main, ["explain", str(file), "--train", "--profile", "--trace", str(trace)])
    assert result.exit_code == 0, result.output
    assert "Kernels, measured" in result.output and f"trace: {trace}" in result.output
    assert json.loads(trace.read_text())["traceEvents"]
    refused = CliRunner().invoke(main, ["explain", str(file), "--trace", str(trace)])
    assert refused.exit_code == 2 and "--profile" in refused.output


def test_a_run_that_is_timed_is_the_run(run):
    """What runs inside the clock is the call and its backward; what is restored afterwards is not."""
    seen = []

    class Timed:
        def __enter__(self):
            seen.append(net.steps)

        def __exit__(self, *raised):
            seen.append(net.steps)

    net = Net()
    result = run_once(net, (torch.randn(8, 16),), {}, train=True, timed=Timed())
    assert seen == [0, 1] and net.steps == 0 and result.gradients
