"""CONTRIBUTING followed to the letter: the file that it says to add, the entries in the pipeline and the table of effects,
and what then is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def step(number: int) -> str:
    """The code of one step of the guide."""
    (section,) = re.findall(rf"^### {number}\. .*?(?=^### |^## )", GUIDE, re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


def edit(path: Path, pattern: str, replacement: str) -> None:
    text, times = re.subn(pattern, lambda m: m[0] + replacement, path.read_text(), count=1, flags=re.MULTILINE)
    assert times == 1
    path.write_text(text)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources with the new pass in it."""
    copied = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("__pycache__"))
    sources = copied / "src/triptych"
    new = sources / "pre_grad/simplify_squares.py"
    if new.exists():  # the tests run where somebody has followed the guide
        return copied
    lines = f"{step(1)}\n\n{step(4)}".splitlines(keepends=True)
    new.write_text("".join(sorted(lines, key=lambda line: not re.match("import |from ", line))))  # imports at the top
    (after,) = re.findall(r"`PRE_GRAD`, after\s+`(\w+)`", GUIDE)
    (row,) = re.findall(r"`(\"simplify_squares\": \w+,)`", GUIDE)
    edit(sources / "pipeline/pre_grad.py", r"(?=^from .entries)", "from ..pre_grad.simplify_squares import SimplifySquares\n")
    edit(sources / "pipeline/pre_grad.py", rf"^PRE_GRAD: list\[Entry\] = \[\n(.*\n)*?    {after},.*\n", "    SimplifySquares,\n")
    edit(sources / "passes/effects.py", r"^EFFECT_OF_PASS: .*\n", f"    {row}\n")
    return copied


def run(checkout: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_new_pass_is_listed_and_runs(checkout):
    (checkout / "model.py").write_text("import torch\ndef model(x): return (-x) * (-x)\nargs = (torch.ones(3),)\n")
    code = (
        "import triptych\n"
        "triptych.compile_fx\n"  # the backend first: what it imports must not need the pass while that is being read
        "from triptych.cli import main\n"
        "main(['passes', 'simplify_squares'], standalone_mode=False)\n"
        "main(['explain', 'model.py', '--option', 'codegen=eager', '--json'], standalone_mode=False)\n"
    )
    page, _, data = run(checkout, "-c", code).partition("{\n")
    assert "Squares of negatives need no negation." in page and "fires     lambda x: (-x) * (-x)" in page
    passes = {record["name"]: record for record in json.loads("{\n" + data)["passes"]}
    assert passes["simplify_squares"]["fired"] == {"square_of_neg": 1}
    assert "1 no-op gone" in run(checkout, "-m", "triptych", "explain", "model.py", "--option", "codegen=eager")


@pytest.mark.slow
def test_its_examples_become_tests_and_the_others_that_concern_passes_stay_green(checkout):
    for name in ("tests", "docs", "bench", "examples", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        source, copy = ROOT / name, checkout / name
        shutil.copytree(source, copy, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, copy)
    (command,) = re.findall(r"`pytest (tests/test_examples.py .*?) --accept`", GUIDE)
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "passed" in run(checkout, *tests, *command.split(), "--accept")
    assert "mul(" in (checkout / "tests/goldens/square_of_neg.txt").read_text()
    assert "passed" in run(checkout, *tests, *command.split())
    run(checkout, "docs/catalogue.py")  # make catalogue
    assert "simplify_squares" in (checkout / "docs/passes.md").read_text()
    concerned = ["test_passes", "test_layers", "test_engine", "test_rules_that_ask", "test_docs", "test_gains", "test_report_page"]
    chosen = "not guide and not export and not first_pass"
    assert "passed" in run(checkout, *tests, "-m", "not slow", *(f"tests/{name}.py" for name in concerned), "-k", chosen)
    assert "simplify_squares" in run(checkout, "-m", "triptych", "passes", "--stage", "pre_grad", "--no-run")
