"""The measured gain of each pass: what it is measured on, and that a run leaves a file whatever becomes of a pass."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import gain_measure
import gain_subjects
import gains
import one_gain
import pytest
import torch
from catalogue import MeasuredGains, pages
from gain_subjects import NotLarger, candidates, every_size, fired, first_size, names, switch
from gain_workloads import WORKLOADS, Machine, Work

from triptych.options import Options
from triptych.passes.catalogue import all_passes, all_rules
from triptych.testing import fires

# ---- what is measured ----


def test_every_name_is_a_pass_or_a_rule_and_can_be_switched():
    known = {*all_passes(), *all_rules()}
    for name in names():
        assert name in known
        on, off = map(Options.make, switch(name))
        assert on != off


def test_passes_with_examples_are_measured():
    measured = set(names())
    assert {"fuse_attention", "mm_plus_mm", "decompose_mm_pass", "noop_slice"} <= measured
    assert "lift_constants" not in measured  # it cannot be removed
    assert switch("decompose_mm_pass") == ({"add_passes": ["decompose_mm_pass"]}, {})
    assert switch("mm_plus_mm") == ({}, {"remove_passes": ["mm_plus_mm"]})


def test_examples_are_made_larger():
    given = ["f32[4, 8]", "f32[1, 8]", "bf16[8]", 2]
    assert every_size(given, 1 << 10) == (["f32[16, 32]", "f32[1, 32]", "bf16[32]", 2], "every size x 4")
    assert first_size(given, 1 << 10) == (["f32[128, 8]", "f32[1, 8]", "bf16[8]", 2], "first size x 32")
    with pytest.raises(NotLarger):
        every_size([torch.ones(4), "f32[4]"], 1 << 10)


def test_an_example_that_refers_to_sizes_is_made_longer_or_stays(monkeypatch):
    examples = [
        fires(lambda x: x * 2, "f32[4, 8]"),
        fires(lambda x: x.view(-1, 2, 4), "f32[4, 8]"),
        fires(lambda x: x.view(4, 2, 4), "f32[4, 8]"),
        fires(lambda x: torch.stack(x.unbind()), "f32[4]"),  # of a larger one, it is another program
        fires(lambda x: x[:, None] * x, "f32[4]"),  # and that would be too large
        fires(lambda x: torch.slice_scatter(x, x, 0, 0, 4), "f32[4, 8]"),  # not refused without data
    ]
    monkeypatch.setattr(gain_subjects, "examples_of", lambda name: examples)
    assert [work.what for work in candidates("noop_slice", "cpu")] == [
        "example 1, every size x 64", "example 2, every size x 64",
        "example 1, first size x 8192", "example 2, first size x 8192",
        *(f"example {i}, as declared, so mostly launches" for i in (1, 2, 3, 4, 5, 6)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_runs(name):
    torch.manual_seed(0)
    work = WORKLOADS[name](Machine("cpu"))
    results = gain_measure.step(work.program, work)()
    assert not work.training or len(results) > 1  # gradients too
    assert all(t.isfinite().all() for t in results)


# ---- one process ----


def test_the_pass_is_on_and_off():
    (work, *_) = candidates("linear_permute_fusion", "cpu")
    on, off = switch("linear_permute_fusion")
    with gain_measure.without_kernels():
        with_pass, without = (gain_measure.compiled(work, how)[1] for how in (on, off))
    assert fired(with_pass.passes, "linear_permute_fusion") == 1
    assert fired(without.passes, "linear_permute_fusion") == 0


@pytest.mark.parametrize("name", ["bernoulli", "fuse_chunk_squeeze_cat_pass"])
def test_the_first_candidate_on_which_the_pass_fires_is_taken(name):
    """Random draws are replaced for Inductor's kernels only: passes decide for those."""
    work = gain_measure.firing_work(name, "cpu")
    assert work is not None and ("size x" in work.what or "as declared" in work.what)


def test_a_program_that_writes_to_its_inputs_gets_them_as_they_were():
    x = torch.ones(3)
    work = Work(lambda x: x.mul_(2) + 1, [x], "")
    call = gain_measure.step(work.program, work)
    for expected in (3.0, 5.0):  # on copies of its own, which it may go on writing to
        assert call()[0].tolist() == [expected] * 3
    assert gain_measure.on_copies(call, work)[0].tolist() == [3.0] * 3 and x.tolist() == [1.0] * 3


def test_a_gain_with_other_results_is_a_failure(monkeypatch):
    work = Work(lambda x: x, [torch.ones(3)], "a program")
    ways = iter([(1.0, 1), (1.2, 0)])  # with the pass, and without: what a call returns, and how often it fired

    def compiled(work, options):
        value, rewrites = next(ways)
        record = SimpleNamespace(name="pad_mm", rewrites=rewrites)
        return lambda inputs: [inputs[0] * value], SimpleNamespace(passes=[record], kernel_launches=1, kernel_bytes=1)

    monkeypatch.setattr(gain_measure, "firing_work", lambda *_: work)
    monkeypatch.setattr(gain_measure, "compiled", compiled)
    figures, calls = gain_measure.prepare("pad_mm", "cpu")
    assert figures == {"workload": "a program", "failure": "results differ by 1.7e-01"} and not calls


def test_each_name_is_taken_once(tmp_path):
    first = one_gain.claimed(["a", "b", "c"], tmp_path, float("inf"))
    assert next(first) == "a"
    assert list(one_gain.claimed(["a", "b", "c"], tmp_path, float("inf"))) == ["b", "c"]
    assert list(first) == []
    assert list(one_gain.claimed(["d"], tmp_path, until=0.0)) == []


def test_the_ratio_is_time_without_over_time_with(monkeypatch):
    monkeypatch.setattr(gain_measure, "turns", lambda *_: {"on": [1.0, 2.0, 3.0], "off": [4.0, 4.0, 5.0]})
    figures = gain_measure.timed({}, "cpu", 3)
    assert figures["ratio"] == 2.0 and figures["ms"] == {"on": 2.0, "off": 4.0}


# ---- the command ----

FIGURES = {
    "workload": "a program", "on": {"kernels": 1, "bytes": 8}, "off": {"kernels": 3, "bytes": 24},
    "ratio": 2.0, "ms": {"on": 1.0, "off": 2.0},
}  # fmt: skip
PROCESS = f"""
import json, os, pathlib, sys
names, claims = sys.argv[1].split(","), pathlib.Path(sys.argv[2])
def report(event): print(json.dumps(event), flush=True)
for name in names:
    try: (claims / name).touch(exist_ok=False)
    except FileExistsError: continue
    report({{"variant": name, "figures": {{"started": True}}}})
    if name == "pad_mm": os.abort()
    report({{"variant": name, "figures": {FIGURES!r}}})
report({{"finished": True}})
"""


def scripted(names, given, claims):
    return lambda case, scratch: [sys.executable, "-S", "-c", PROCESS, ",".join(names), claims]


def test_a_run_is_saved_and_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gains, "measuring", scripted)
    arguments = ["--device", "cpu", "--output", str(tmp_path)]
    assert gains.main(["freeze", "pad_mm", "mm_plus_mm", *arguments]) == 0
    written = json.loads((tmp_path / "gains-cpu.json").read_text())
    assert written["command"] == "python bench/gains.py freeze pad_mm mm_plus_mm --device cpu"
    assert written["gains"]["freeze"] == FIGURES
    assert "SIGABRT" in written["gains"]["pad_mm"]["failure"]
    assert written["gains"]["mm_plus_mm"] == FIGURES  # by the process that took the place of the other
    shown = capsys.readouterr().out
    assert "2.00x  2.000 -> 1.000 ms  3 -> 1 kernels  a program" in shown and "failed: ended by SIGABRT" in shown

    assert gains.main(["freeze", "B2B_GEMM_PASS", "--resume", *arguments]) == 0
    assert set(json.loads((tmp_path / "gains-cpu.json").read_text())["gains"]) == {
        "freeze", "pad_mm", "mm_plus_mm", "B2B_GEMM_PASS",
    }  # fmt: skip
    with pytest.raises(SystemExit):
        gains.main(["--resume", "--rounds", "3", *arguments])
    assert "has other rounds" in capsys.readouterr().err


def test_unknown_names(capsys):
    with pytest.raises(SystemExit):
        gains.main(["pad_mmm"])
    assert "did you mean 'pad_mm'" in capsys.readouterr().err


# ---- the catalogue ----


def measured(**figures):
    quartiles = {"quartiles_ms": {"on": [0.9, 1.1], "off": [1.9, 2.1]}}
    header = {"machine": "a GPU", "versions": "torch 2", "command": "python bench/gains.py", "rounds": 9}
    return {**header, "gains": {name: {**FIGURES, **quartiles, **other} for name, other in figures.items()}}


def test_the_catalogue_shows_gains_where_there_are_any(tmp_path):
    file = tmp_path / "gains-cuda.json"
    data = measured(pad_mm={}, group_batch_fusion_passes={"ratio": 3.0}, mm_plus_mm={"quartiles_ms": {"on": [0.9, 2.0], "off": [1.9, 2.1]}})
    data["gains"]["auto_chunker"] = {"skipped": "does not fire on this workload here"}
    file.write_text(json.dumps(data))
    shown = pages(MeasuredGains.load(file))
    assert "Measured on a GPU, with torch 2, by `python bench/gains.py`; medians of 9 rounds" in shown["passes.md"]
    rows = shown["passes.md"].splitlines()
    assert [row[-6:] for row in rows if "| `pad_mm` |" in row] == ["| 2x |"]
    assert [row[-4:] for row in rows if "| `auto_chunker` |" in row] == ["|  |"]
    # by that name one pass runs by default, and another, which was not measured, if it is added
    assert [row[-5:] == " 3x |" for row in rows if "| `group_batch_fusion_passes`" in row] == [True, False]
    joint, post_grad = shown["passes/joint.md"], shown["passes/post_grad.md"]
    sentence = "(1 ms instead of 2 ms, 1 kernel instead of 3, an estimated 8e-06 MB read and written instead of 2.4e-05 MB)"
    assert f"Measured gain: 2x {sentence}, on: a program." in joint
    assert f"Measured gain: no difference in time {sentence}" in post_grad  # the rounds overlap
    assert "does not fire" not in joint

    nothing = pages(MeasuredGains.load(tmp_path / "none.json"))
    assert "Measured" not in "".join(nothing.values()) and "| gain |" not in nothing["passes.md"]
