"""The help texts, whose examples are run; completion; `triptych doctor`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from triptych import _private
from triptych.cli import main
from triptych.codegen.eager import EagerCodegen
from triptych.codegen.inductor import InductorCodegen
from triptych.cost import clock
from triptych.cost.store import add_to_store
from triptych.explaining import doctor

ROOT = Path(__file__).parent.parent
COMMANDS = ["bisect", "demo", "doctor", "explain", "passes", "record", "repro", "why-not"]


def help_of(*names: str) -> str:
    return CliRunner().invoke(main, [*names, "--help"]).output


def examples(text: str) -> list[str]:
    """The lines below "Example:" in a help text."""
    (block,) = re.findall(r"^  Examples?:\n((?:    .*\n)+)", text + "\n", re.MULTILINE)
    return [line.strip() for line in block.splitlines()]


SLOW = ("triptych demo", "triptych passes --stage pre_grad")
"""Of these a smaller form is run elsewhere; of `demo`, one of the two that the help texts have."""
ALL = [
    pytest.param(line, marks=[pytest.mark.slow] if line in SLOW else [], id=line)
    for line in dict.fromkeys(line for name in [(), *((name,) for name in COMMANDS)] for line in examples(help_of(*name)))
]

MODEL = """
import torch
from torch import nn

def model(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / 4, dim=-1) @ v

args = tuple(torch.randn(3, 1, 2, 64, 16))

def tower(x):
    return torch.cat([torch.cat([x, x]), x]).relu()

tower_args = (torch.randn(3, requires_grad=True),)

def make():
    return nn.Linear(4, 4), (torch.randn(2, 4),)
"""
TRAIN = """
import sys
import torch

step = torch.compile(lambda x: x.sin(), backend="triptych")
assert sys.argv[1:] == ["--steps", "10"]
step(torch.randn(3))
"""
MY_TEST = """
import torch
import triptych

compiled = torch.compile(torch.sin, backend=triptych.compile_fx, options={"codegen": "eager"})
assert torch.equal(compiled(torch.zeros(3)), torch.zeros(3))
"""
RULES = '''
import triptych

class MyRule(triptych.Rule):
    """neg(neg(x)) -> x"""

    def pattern(self, op, x):
        return op.neg(op.neg(x))

    def rewrite(self, op, x):
        return x
'''


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("sys.path", list(sys.path))
    for name, text in (("model.py", MODEL), ("rules.py", RULES), ("my_test.py", MY_TEST), ("train.py", TRAIN)):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


@pytest.mark.parametrize("line", ALL)
def test_examples_of_the_help_texts(line, files, monkeypatch):
    monkeypatch.setattr(InductorCodegen, "emit", lambda self, *given: EagerCodegen().emit(*given))  # passes, no kernels
    program, *arguments = shlex.split(line)
    assert program == "triptych"
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout and not result.stderr
    if "--json" in arguments:
        json.loads(result.stdout)
    for name in ("tower.html", "both.html", "run.html", "report/triptych-demo.html"):
        if name.split("/")[0] in arguments:
            assert Path(name).exists()


def test_every_command_has_an_example_of_itself():
    assert sorted(main.commands) == COMMANDS
    for name in COMMANDS:
        lines = examples(help_of(name))
        assert lines and all(line.startswith(f"triptych {name}") for line in lines)


def test_what_prints_data_takes_json_and_all_help_is_within_the_line():
    for name, command in main.commands.items():
        assert any("--json" in param.opts for param in command.params), name
        assert max(map(len, help_of(name).splitlines())) <= 80
    assert "Exit codes:" in help_of() and "_TRIPTYCH_COMPLETE=bash_source" in help_of()


def test_options_are_described():
    for command in main.commands.values():
        undescribed = [p.name for p in command.params if isinstance(p, click.Option) and not p.help and p.name != "device"]
        assert not undescribed


def test_the_command_line_is_documented():
    text = (ROOT / "docs" / "command_line.md").read_text()
    for name, command in main.commands.items():
        assert f"triptych {name}" in text
        for param in command.params:
            if isinstance(param, click.Option) and param.name != "with_traceback":
                assert f"`{param.opts[0]}" in text, f"{name} {param.opts[0]}"


def test_help_does_not_wait_for_the_compiler():
    code = "import sys, triptych.cli; print(*[m for m in sys.modules if m.startswith(('triptych.', 'torch._inductor', 'torch._dynamo.'))])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"triptych.pipeline", "triptych.backend", "torch._inductor.config"} & set(loaded)


# ---- completion ----


def completions(*words: str) -> list[str]:
    """What click would offer for the last word."""
    from click.shell_completion import ShellComplete

    *before, last = words
    return [item.value for item in ShellComplete(main, {}, "triptych", "_TRIPTYCH_COMPLETE").get_completions(before, last)]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("why",), "why-not"),
        (("passes", "fuse_att"), "fuse_attention"),
        (("passes", "--stage", "pre"), "pre_grad"),
        (("why-not", "pointless_p"), "pointless_permute_pair"),
        (("explain", "model.py", "--pass", "merge_c"), "merge_concats_pass"),
        (("explain", "model.py", "--option", "codeg"), "codegen="),
        (("bisect", "model.py", "--option", "pad_mm."), "pad_mm.always="),
    ],
)  # fmt: skip
def test_names_are_completed(words, offered):
    assert offered in completions(*words)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_the_line_of_the_help_text_gives_a_script():
    from click.shell_completion import BashComplete

    script = BashComplete(main, {}, "triptych", "_TRIPTYCH_COMPLETE").source()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "complete -o nosort -F" in script


# ---- doctor ----


def found(**how) -> dict[str, doctor.Finding]:
    return {name: check() for name, check in doctor.examine(**how)}


def test_doctor_looks_at_everything_a_compile_needs():
    findings = found(compile=False)
    assert all(finding.status != doctor.BAD for finding in findings.values()), findings
    assert torch.__version__ in findings["versions"].detail
    assert str(len(_private.NAMES)) in findings["private names of torch"].detail


def test_doctor_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(_private, "missing", lambda: ["compile_fx_inner"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    findings = found(compile=False)
    assert findings["private names of torch"].status == doctor.BAD
    assert findings["C++ compiler"].status == doctor.BAD and "codegen" in findings["C++ compiler"].advice
    assert findings["Triptych's cache"].status == doctor.WARNING
    result = CliRunner().invoke(main, ["doctor", "--no-compile"])
    assert result.exit_code == 1 and "NO  C++ compiler" in result.stdout
    assert result.stderr == "triptych: not in order: private names of torch, C++ compiler\n"
    data = json.loads(CliRunner().invoke(main, ["doctor", "--no-compile", "--json"]).stdout)
    assert {"name", "status", "detail", "advice"} == set(data[0])


def test_doctor_shows_what_was_measured_and_forgets_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = CliRunner().invoke
    assert "none yet" in found(compile=False)["measurements"].detail
    assert run(main, ["doctor", "--forget-measurements"]).stdout == "nothing was stored\n"
    add_to_store(clock.MEASUREMENTS, "a question", [[1e-5, 0.01]])
    path = tmp_path / "triptych" / clock.MEASUREMENTS
    assert found(compile=False)["measurements"].detail.startswith(f"1 in {path}, ")
    assert "last added to today" in run(main, ["doctor", "--no-compile"]).stdout
    assert json.loads(run(main, ["doctor", "--forget-measurements", "--json"]).stdout) == [str(path)]
    assert not path.exists()


def test_doctor_compiles_and_compares(monkeypatch):
    name = "tiny compile, codegen=eager, cpu"
    checks = dict(doctor.examine())
    assert checks[name]().status == doctor.GOOD
    monkeypatch.setattr(doctor, "TOLERANCE", -1.0)
    assert "differs from eager" in checks[name]().detail
    monkeypatch.setattr(EagerCodegen, "emit", None)
    assert checks[name]().status == doctor.BAD and "TypeError" in checks[name]().detail


# ---- make demo ----


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_the_demo_installs_no_test_tools(tmp_path):
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", "demo"]
    steps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "pip install" in steps and "triptych demo" in steps and "[test]" not in steps
