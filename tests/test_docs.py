"""The documentation is run: every Python block of the guide, in order, in one namespace."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest
import torch

from triptych.codegen.eager import EagerCodegen
from triptych.codegen.inductor import InductorCodegen
from triptych.explaining.demo import run_demo
from triptych.explaining.phrases import summary

ROOT = Path(__file__).parent.parent


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """Each block with the line it starts in."""
    text = path.read_text()
    return [
        (text[: found.start(1)].count("\n"), found.group(1))
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def run_guide(path: Path) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "guide"}
    linecache.checkcache()
    for start, block in python_blocks(path):
        # with the file's own line numbers, so that errors and source lines point into the guide
        exec(compile("\n" * start + block, str(path), "exec"), namespace)
    return namespace


def test_first_pass_in_ten_minutes():
    namespace = run_guide(ROOT / "CONTRIBUTING.md")
    outcome = namespace["outcome"]
    assert "because" in str(namespace["example"]) and outcome.rewrites == 0


def test_freeze():
    run_guide(ROOT / "docs" / "freeze.md")


def test_known_buffers():
    run_guide(ROOT / "docs" / "known_buffers.md")


def test_rules_for_the_joint_graph(capsys):
    """The graph that the guide shows is the one it prints."""
    namespace = run_guide(ROOT / "docs" / "joint_rules.md")
    printed = re.sub(r"  # \S+$", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert printed.strip() in (ROOT / "docs" / "joint_rules.md").read_text()
    assert namespace["w"].grad.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_local_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / link).exists(), f"{name} links to {link}, which is not there"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="modules print themselves otherwise in other releases")
def test_the_catalogue_is_current():
    """`make docs` writes it; a change of a pass that is not in it fails here."""
    from triptych.passes.document import document

    assert (ROOT / "docs" / "passes.md").read_text() == document(), "docs/passes.md is stale: run make docs"


ROW = re.compile(r"● (\w+) .*? {2,}(\d+)(?: {2,}\d+)? {2,}(\d+) -> (\d+) +[\d.]+ ms$", re.MULTILINE)


def test_the_table_of_the_readme_is_what_explain_prints(monkeypatch):
    """But for times, and for rows that are left out."""
    monkeypatch.setattr(InductorCodegen, "emit", lambda self, *given: EagerCodegen().emit(*given))  # passes, no kernels
    explanation = run_demo().training
    told = (ROOT / "README.md").read_text().split("```text\n")[1]
    rows = [(p.name, p.rewrites, p.nodes_before, p.nodes_after) for p in explanation.passes if p.changed]
    shown = [(name, *map(int, numbers)) for name, *numbers in ROW.findall(told)]
    assert len(shown) > 5 and [row for row in rows if row in shown] == shown
    head = " ".join(told.partition("\n\n")[0].splitlines())
    without_kernels, count = re.subn(r"; \d+ kernel launches", "", head)
    assert count == 1 and without_kernels.rpartition(";")[0] == summary(explanation).rpartition(";")[0]
