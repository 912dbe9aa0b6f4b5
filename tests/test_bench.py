"""The benchmark suite: its models build and run, and a run ends with a table whatever becomes of a model."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import compile_time
import pytest
import suite
import tables
import torch
from device_lock import DeviceLock
from measure import relative_error, turns
from models import INFERENCE, MODELS, TRAINING, Unavailable, build
from processes import BusyClock, Settings, run_all
from variants import VARIANTS

# ---- models ----


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_and_has_gradients(name):
    try:
        workload = build(name, small=True)
    except Unavailable as error:
        pytest.skip(str(error))
    with torch.no_grad():
        output = workload.program(INFERENCE)(**workload.inputs)
    assert output.isfinite().all()
    if workload.loss is None:
        return
    loss = workload.program(TRAINING)(**workload.inputs)
    loss.backward()
    trained = [weight for weight in workload.model.parameters() if weight.requires_grad]
    assert loss.shape == () and loss.isfinite() and all(weight.grad is not None for weight in trained)


def test_a_model_is_the_same_every_time():
    one, other = (build("towers", small=True) for _ in range(2))
    torch.testing.assert_close(one.program(INFERENCE)(**one.inputs), other.program(INFERENCE)(**other.inputs))


def test_rotary_frequencies_keep_their_type():
    workload = build("llama", small=True).to("cpu", torch.bfloat16)
    types = {name.rpartition(".")[2]: tensor.dtype for name, tensor in workload.model.named_buffers()}
    assert types["inv_freq"] == torch.float32
    assert {weight.dtype for weight in workload.model.parameters()} == {torch.bfloat16}


def test_without_torchvision_and_timm_the_reason_is_given(monkeypatch):
    for package in ("torchvision.models", "torchvision", "timm"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match="needs torchvision or timm"):
        build("resnet50", small=True)


# ---- measuring ----


def test_variants_take_turns():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    figures = turns(calls, "cpu", rounds=3, times=2)
    assert "".join(order[-18:]) == "aabbcc" + "ccbbaa" + "aabbcc"
    assert {name: len(times) for name, times in figures.items()} == {"a": 3, "b": 3, "c": 3}


def test_relative_error():
    exact = [torch.tensor([3.0, 4.0]).double()]
    assert relative_error([torch.tensor([3.0, 4.5])], exact) == pytest.approx(0.1)
    assert relative_error([torch.tensor([3.0, float("nan")])], exact) == float("inf")


def _measure(folder: Path, events) -> None:
    with DeviceLock("test", folder).measuring():
        events.put("measuring")


def test_measuring_waits_for_those_who_compile_and_goes_before_others(tmp_path):
    context = multiprocessing.get_context("fork")
    events = context.Queue()
    lock = DeviceLock("test", tmp_path)
    with lock.compiling(), lock.compiling():  # together
        process = context.Process(target=_measure, args=(tmp_path, events))
        process.start()
        (turn,) = tmp_path.glob("*.turn")
        while _is_free(turn):  # until the other process waits for its turn
            time.sleep(0.01)
        assert events.empty()
    assert events.get(timeout=60) == "measuring"
    process.join(60)
    with lock.compiling():
        pass


def _is_free(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_readme_and_documentation_show_the_saved_figures():
    root = Path(__file__).parent.parent
    run = tables.load(Path(tables.__file__).with_name("results") / "suite-cuda")
    assert tables.for_docs(*run) in (root / "docs/benchmarks.md").read_text()
    assert tables.headline(*run) in " ".join((root / "README.md").read_text().split("\n"))


# ---- processes ----

SCRIPTS = {
    "good": """report({"eager_error": 1e-7, "rounding": 1e-5})
for name, ms in (("eager", 4.0), ("inductor", 2.0), ("triptych", 1.0)):
    report({"variant": name, "figures": {"error": 1e-7}})
    report({"variant": name, "figures": {"ms": ms}})
report({"finished": True})""",
    "slow_and_wrong": """report({"eager_error": 1e-7, "rounding": 1e-5})
report({"variant": "inductor", "figures": {"error": 1e-7, "ms": 2.0}})
report({"variant": "triptych", "figures": {"error": 0.1, "ms": 4.0}})
report({"finished": True})""",
    "one_variant_fails": """report({"eager_error": 1e-7, "rounding": 1e-5})
report({"variant": "inductor", "figures": {"error": 1e-7, "ms": 2.0}})
report({"variant": "triptych", "figures": {"failure": "RuntimeError: no"}})
report({"finished": True})""",
    "crashing": """report({"state": "compiling triptych"})
import os; os.abort()""",
    "raising": "raise RuntimeError('out of memory')",
    "hanging": """report({"state": "compiling inductor"})
import time; time.sleep(600)""",
    "absent": """report({"skipped": "needs another package"})""",
}
REPORT = "import json\ndef report(event): print(json.dumps(event), flush=True)\n"


def scripted(case, scratch):
    """In place of measuring a model: a script that reports what such a process would."""
    return [sys.executable, "-S", "-c", REPORT + SCRIPTS[case[0]]]


def run(*names: str, folder: Path, limit: float = 60.0) -> dict[str, dict]:
    settings = Settings(scripted, workers=3, time_limit=limit, logs=folder / "logs")
    return {record["model"]: record for record in run_all([(name, INFERENCE) for name in names], settings)}


def test_a_crash_is_a_row_and_costs_nobody_else(tmp_path):
    records = run("crashing", "good", "raising", "absent", "one_variant_fails", folder=tmp_path)
    status = {name: record["status"] for name, record in records.items()}
    assert status == {
        "crashing": "crashed", "good": "measured", "raising": "crashed", "absent": "skipped", "one_variant_fails": "failed",
    }  # fmt: skip
    assert "SIGABRT, compiling triptych" in records["crashing"]["reason"]
    assert "out of memory" in records["raising"]["reason"]
    assert records["absent"]["reason"] == "needs another package"
    assert records["one_variant_fails"]["variants"]["inductor"]["ms"] == 2.0
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"{name}-inference.log" for name in ("crashing", "raising", "one_variant_fails")}


def test_a_case_that_takes_too_long_is_ended(tmp_path):
    record = run("hanging", folder=tmp_path, limit=0.5)["hanging"]
    assert record["status"] == "timed out" and record["reason"].startswith("more than 0.5 s, ")


def test_waiting_does_not_count_as_time():
    now = 10.0
    clock = BusyClock(lambda: now)
    for state, seconds in (("compiling", 2.0), ("waiting", 100.0), ("measuring", 4.0), ("waiting", 100.0)):
        clock.enter(state)
        now += seconds
    assert clock.seconds() == 6.0


# ---- tables ----


def test_tables_and_summary(tmp_path):
    records = run("good", "slow_and_wrong", "crashing", "one_variant_fails", folder=tmp_path)
    header = {"machine": "a machine"}
    ordered = [records[name] for name in ("good", "slow_and_wrong", "crashing", "one_variant_fails")]
    tables.save(tmp_path / "run", header, ordered)
    assert tables.load(tmp_path / "run") == (header, json.loads(json.dumps(ordered)))
    text = (tmp_path / "run.md").read_text()
    assert "| model | inductor | eager | triptych |" in text
    assert "| good | 2.000 | 0.50x | 2.00x |" in text
    assert "| slow_and_wrong | 2.000 |  | 0.50x wrong |" in text
    assert "| crashing | crashed |  |  |" in text
    assert "| one_variant_fails | 2.000 |  | failed |" in text
    summary = tables.summary(ordered)
    assert "inference, default: 1.00x over 2" in summary  # the mean of 2 and 1/2
    assert "- slow_and_wrong inference, default: 0.50x" in summary and "- good inference, default" not in summary
    assert "- slow_and_wrong inference, triptych: error 1.0e-01" in summary
    assert "- one_variant_fails inference, triptych: RuntimeError: no" in summary


def test_variants_by_device_and_mode():
    names = lambda *where: [name for name, variant in VARIANTS.items() if variant.applies(*where)]  # noqa: E731
    assert names("cuda", INFERENCE) == list(VARIANTS)
    assert names("cpu", TRAINING) == ["eager", "inductor", "triptych"]
    ours = ["triptych", "triptych-called", "triptych-graphs"]
    assert names("cuda", TRAINING) == ["eager", "inductor", "inductor-graphs", *ours]


# ---- the command ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["brt"], "unknown model 'brt'; did you mean 'bert'"),
        (["--variants", "eager,triptic"], "unknown variant 'triptic'; did you mean 'triptych'"),
        (["--rounds", "0"], "at least 1, not 0"),
        (["--rounds", "many"], "'many' is not a number"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        suite.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_list(capsys):
    assert suite.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*MODELS, *VARIANTS))


def test_resume_runs_what_has_no_row(tmp_path, monkeypatch, capsys):
    ran = []

    def command(*_):
        return lambda case, scratch: ran.append(case) or scripted(("good",), scratch)

    monkeypatch.setattr(suite, "measuring", command)
    arguments = ["--device", "cpu", "--output", str(tmp_path)]
    assert suite.main(["towers", "mmoe", "--mode", "inference", *arguments]) == 0
    assert suite.main(["towers", "dlrm", "--resume", *arguments]) == 0
    assert ran == [("towers", INFERENCE), ("mmoe", INFERENCE)] + [
        ("towers", TRAINING), ("dlrm", INFERENCE), ("dlrm", TRAINING)
    ]  # fmt: skip
    _, records = tables.load(tmp_path / "suite-cpu")
    assert len(records) == 5 and "triptych 2.00x" in capsys.readouterr().out
    assert suite.main(["towers", "--stop-after", "0", *arguments, "--output", str(tmp_path / "none")]) == 0
    assert len(ran) == 5 and "2 of 2 were not started" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        suite.main(["towers", "--resume", "--rounds", "3", *arguments])
    assert "has other rounds" in capsys.readouterr().err


@pytest.mark.slow
def test_two_models_through_the_command(tmp_path):
    """All that a CPU can run, with kernels: every variant is timed, and right."""
    command = [sys.executable, suite.__file__, "towers", "mmoe", "resnet50", "--device", "cpu", "--mode", "inference"]
    subprocess.run([*command, "--rounds", "1", "--output", str(tmp_path)], check=True, timeout=900)
    _, records = tables.load(tmp_path / "suite-cpu")
    for record in records[:2]:
        assert record["status"] == "measured", record
        assert list(record["variants"]) == ["eager", "inductor", "inductor-freezing", "triptych", "triptych-freeze"]
        for name, figures in record["variants"].items():
            assert figures["ms"] > 0 and not tables.wrong(record, name)
            assert name == "eager" or figures["kernels"] > 0
            assert (figures["compile_s"] is not None) == (name in ("inductor", "triptych"))  # the others share kernels


# ---- compile times ----


def compile_figures(seconds: float) -> dict:
    return {kind: {"wall": seconds, "cpu": 2 * seconds} for kind in compile_time.KINDS}


def test_compile_times_are_medians_and_ratios():
    figures = {"inductor": [compile_figures(s) for s in (1, 4, 2)], "triptych": [compile_figures(s) for s in (3, 9, 1)]}
    rows = list(compile_time.table_rows("gpt-1", "inference", figures))
    assert [row[2] for row in rows[::2]] == list(compile_time.KINDS)
    assert rows[0] == ("gpt-1", "inference", "cold", "clock", "2.00", "3.00", "1.50")
    assert rows[1] == ("gpt-1", "inference", "cold", "processor", "4.00", "6.00", "1.50")
    lines = compile_time.markdown(("a", "b", "c", "d", "e"), [("1", "2", "3", "4", "5")]).splitlines()
    assert lines == ["| a | b | c | d | e |", "| --- | --- | --- | --- | ---: |", "| 1 | 2 | 3 | 4 | 5 |"]


def test_compilers_take_turns_with_caches_of_their_own(monkeypatch, capsys):
    started = []

    def child(arguments, caches):
        started.append((arguments[3], arguments[-1], caches))
        second = {"second process": {}, "after import": {}, "from cache": arguments[3] == "inductor"}
        return second if arguments[-1] == "second" else {"cold": {}, "warm": {}}

    monkeypatch.setattr(compile_time, "child", child)
    figures = compile_time.measure("gpt-1", "training", "cpu", 2)
    assert [one[0] for one in started[::2]] == ["inductor", "triptych", "triptych", "inductor"]
    assert [one[1] for one in started] == ["cold", "second"] * 4
    caches = [one[2] for one in started]
    assert caches[::2] == caches[1::2] and len(set(caches)) == 4
    assert set(figures["triptych"][1]) == set(compile_time.KINDS)
    # what the second process compiles anew is said
    assert capsys.readouterr().err.count("triptych: the second process has compiled something anew") == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", [INFERENCE, TRAINING])
def test_a_compile_is_timed_cold_warm_and_in_a_second_process(mode):
    (figures,) = compile_time.measure("gpt-1", mode, "cpu", 1)["triptych"]
    assert figures["warm"]["cpu"] < figures["cold"]["cpu"]
    assert 0 < figures["after import"]["cpu"] < figures["second process"]["cpu"]
    assert figures["after import"]["wall"] < figures["second process"]["wall"]


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    arguments = ["gpt-1", TRAINING, "--compiler", "triptych", "--kind"]
    assert "from cache" not in compile_time.child([*arguments, "cold"], str(tmp_path))
    assert compile_time.child([*arguments, "second"], str(tmp_path))["from cache"]
