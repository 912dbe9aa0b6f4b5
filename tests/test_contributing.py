"""CONTRIBUTING followed to the letter: the file that it says to add, the entry in the pipeline, and what then is there."""

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


def step(number: int) -> str:
    """The code of one step of the guide."""
    (section,) = re.findall(rf"^### {number}\. .*?(?=^### |^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources with the new pass in it."""
    copied = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "src/triptych/pre_grad/simplify_squares.py").write_text(step(1) + "\n\n" + step(4))
    pipeline = copied / "src/triptych/pipeline/pre_grad.py"
    text = pipeline.read_text()
    text = text.replace("from .entries", "from ..pre_grad.simplify_squares import SimplifySquares\nfrom .entries", 1)
    text = re.sub(r"(?<=^PRE_GRAD: list\[Entry\] = \[\n)(?:.*\n)*?    RemoveNoopPass,\n", lambda m: m[0] + "    SimplifySquares,\n", text, flags=re.MULTILINE)
    assert text.count("SimplifySquares") == 2
    pipeline.write_text(text)
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


@pytest.mark.slow
def test_its_examples_become_tests(checkout):
    for name in ("tests", "docs", "pyproject.toml"):
        source, copy = ROOT / name, checkout / name
        shutil.copytree(source, copy, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, copy)
    (command,) = re.findall(r"`pytest (tests/test_examples.py .*?) --accept`", (ROOT / "CONTRIBUTING.md").read_text())
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *command.split()]
    assert "passed" in run(checkout, *tests, "--accept")
    assert "mul(" in (checkout / "tests/goldens/square_of_neg.txt").read_text()
    assert "passed" in run(checkout, *tests)
    assert "simplify_squares" in run(checkout, "-m", "triptych", "passes", "--stage", "pre_grad", "--no-run")
