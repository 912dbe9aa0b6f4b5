"""`TRIPTYCH_REPORT=dir`: a process leaves its report, however it ends, and never suffers from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from triptych.explaining import report_at_exit
from triptych.explaining.report_at_exit import ReportAtExit, replace_file

SCRIPT = """
import os, sys, torch

def program(x):
    y = x.sin()
    print("between")
    return y.cos()

run = torch.compile(program, backend="triptych", options={"codegen": "eager"})
run(torch.randn(3))
run(torch.randn(5))
"""


def run_script(tmp_path, more: str = "", reports=None, flags=(), **variables):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + textwrap.dedent(more))
    reports = reports or tmp_path / "reports"
    environment = {**os.environ, "TRIPTYCH_REPORT": str(reports), **variables}
    command = [sys.executable, *flags, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def data_of(tmp_path):
    (path,) = (tmp_path / "reports").glob("train-*.json")
    assert path.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert not list(path.parent.glob(".*")), "no half-written file stays"
    return json.loads(path.read_text())


def test_a_process_leaves_its_report(tmp_path):
    done = run_script(tmp_path, 'raise ValueError("the program fails, too")')
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    data = data_of(tmp_path)
    assert data["model"] == "train.py"
    assert [frame["source"] for frame in data["frames"]] == ["train.py:4", "train.py:6"] * 2
    assert [frame["reason"][:10] for frame in data["frames"]] == ["", "", "tensor 'x'", "tensor 'y'"]
    assert data["frames"][0]["breaks"][0]["source"] == "train.py:6"
    assert {record["program"] for record in data["passes"]} == {1, 2, 3, 4}


def test_a_process_that_is_killed_leaves_what_it_had_written(tmp_path):
    done = run_script(tmp_path, "os._exit(7)")
    assert done.returncode == 7
    assert data_of(tmp_path)["passes"]


@pytest.mark.slow
def test_a_fork_has_a_report_of_its_own(tmp_path):
    fork = """
    if os.fork() == 0:
        torch.compile(lambda x: x.tan(), backend="triptych", options={"codegen": "eager"})(torch.randn(3))
        sys.exit()
    os.wait()
    """
    assert run_script(tmp_path, fork).returncode == 0
    files = sorted((tmp_path / "reports").glob("*.json"))
    programs = sorted(len(json.loads(path.read_text())["programs"]) for path in files)
    assert programs == [1, 4]


def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    done = run_script(tmp_path, reports=tmp_path / "file" / "deeper")
    assert done.returncode == 0 and done.stderr.count("TRIPTYCH_REPORT: no report of this process") == 1
    done = run_script(tmp_path, 'print("done")', reports=tmp_path / "file", flags=("-W", "error::RuntimeWarning"))
    assert done.returncode == 0 and "done" in done.stdout
    assert done.stderr.count("TRIPTYCH_REPORT: no report of this process") == 1


def test_a_process_that_compiles_nothing_leaves_nothing(tmp_path):
    environment = {**os.environ, "TRIPTYCH_REPORT": str(tmp_path / "reports")}
    subprocess.run([sys.executable, "-c", "import triptych"], env=environment, check=True, timeout=120)
    assert not (tmp_path / "reports").exists()


@pytest.fixture
def report(tmp_path):
    report = ReportAtExit(tmp_path)
    yield report
    report.recording.stop()


def test_writing_takes_its_share_of_the_time_and_no_more(report, monkeypatch):
    now, writes = [100.0], []

    def write():
        writes.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(report_at_exit.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(report, "write", write)
    compiled = torch.compile(lambda x: x.sin(), backend="triptych", options={"codegen": "eager"})
    compiled(torch.randn(3))
    compiled(torch.randn(3, dtype=torch.float64))  # too early
    now[0] += 10
    compiled(torch.randn(3, dtype=torch.float16))
    assert writes == [100.0, 111.0]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    replace_file(path, "first")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        replace_file(path, "second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
