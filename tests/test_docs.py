"""The documentation is run: every Python block of the guide, in order, in one namespace."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import catalogue
import pytest
import torch

from triptych.codegen.eager import EagerCodegen
from triptych.codegen.inductor import InductorCodegen

ROOT = Path(__file__).parent.parent


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """Each block with the line it starts in."""
    text = path.read_text()
    return [
        (text[: found.start(1)].count("\n"), found.group(1))
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def run_guide(path: Path) -> dict[str, object]:
    return run_blocks(path, python_blocks(path), {"__name__": "guide"})


def run_blocks(path: Path, blocks: list[tuple[int, str]], namespace: dict[str, object]) -> dict[str, object]:
    linecache.checkcache()
    for start, block in blocks:
        # with the file's own line numbers, so that errors and source lines point into the guide
        exec(compile("\n" * start + block, str(path), "exec"), namespace)
    return namespace


def test_first_pass_in_ten_minutes():
    namespace = run_guide(ROOT / "CONTRIBUTING.md")
    outcome = namespace["outcome"]
    assert "because" in str(namespace["example"]) and outcome.rewrites == 0


GUIDES = [
    "backends", "freeze", "getting_started", "index", "interop", "json", "known_buffers", "report", "troubleshooting", "writing_rules",
]  # fmt: skip
"""Pages whose code is run; `attention`, `flow` and `joint_rules` have tests of their own, for what they print. That of
`distributed` needs several ranks."""


@pytest.mark.parametrize("name", GUIDES)
def test_guide(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    run_guide(ROOT / "docs" / f"{name}.md")


@pytest.mark.slow
def test_export(tmp_path, monkeypatch):
    """With a package that AOTInductor compiles."""
    monkeypatch.chdir(tmp_path)
    run_guide(ROOT / "docs" / "export.md")


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other releases trace some operations to other ATen calls")
@pytest.mark.parametrize("name", ["flow", "joint_rules"])
def test_guide_shows_the_graphs_that_it_prints(name, capsys):
    path = ROOT / "docs" / f"{name}.md"
    namespace = run_guide(path)
    printed = re.sub(r"  # \S+?(?=$|  <- )", "", capsys.readouterr().out, flags=re.MULTILINE)
    shown = re.findall(r"^```text\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    assert printed.strip() in "".join(graph for graph in shown if "return" in graph or " {" in graph)
    if name == "joint_rules":
        assert namespace["w"].grad.tolist() == [3.0, 3.0, 3.0]


PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


@pytest.mark.parametrize("name", PAGES)
def test_local_links_lead_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{name} links to {link}, which is not there"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_local_links_lead_to_headings_that_are_there(name):
    page = ROOT / name
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / link if link else page
        headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", target.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
        assert anchor in map(slug, headings), f"{name} links to {link}#{anchor}, a heading that is not there"


def test_every_page_is_in_the_table_of_contents():
    listed = set(re.findall(r"^([\w/]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    there = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts}
    assert there - {"index"} == listed


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="modules print themselves otherwise in other releases")
def test_the_catalogue_is_current():
    """`make catalogue` writes it; a change of a pass that is not in it fails here, and in `make docs` as CI runs it."""
    stale = catalogue.stale_pages()
    assert not stale, f"{', '.join(stale)}: run make catalogue"


def test_a_stale_page_is_named_and_written_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(catalogue, "DOCS", tmp_path)
    monkeypatch.setattr(catalogue, "pages", lambda: {"passes.md": "new", "passes/joint.md": "new", "options.md": "same"})
    (tmp_path / "passes.md").write_text("old")
    (tmp_path / "options.md").write_text("same")
    assert catalogue.main("--check") == 1
    told = capsys.readouterr().err
    assert "docs/passes.md is stale: run make catalogue" in told and "docs/passes/joint.md" in told and "options" not in told
    assert (tmp_path / "passes.md").read_text() == "old" and not (tmp_path / "passes").exists()
    assert catalogue.main() == 0 and catalogue.main("--check") == 0
    assert (tmp_path / "passes/joint.md").read_text() == "new"


ROW = re.compile(r"● (\w+) .*? {2,}(\d+)(?: {2,}\d+)? {2,}(\d+) -> (\d+) +[\d.]+ ms$", re.MULTILINE)
TIME = re.compile(r"[\d.]+ (?=us)")


def test_the_readme_runs_and_shows_a_part_of_what_its_first_program_prints(tmp_path, monkeypatch, capsys):
    """The program as it stands, with kernels; the other blocks without. Times may differ; of rows and of
    phrases the page shows some, not those that change with each new pass."""
    monkeypatch.chdir(tmp_path)
    readme = ROOT / "README.md"
    namespace: dict[str, object] = {"__name__": "guide"}
    (_, program), *_ = blocks = python_blocks(readme)
    assert "backend=\"triptych\"" in program and len(program.splitlines()) < 20
    run_blocks(readme, blocks[:1], namespace)
    printed = capsys.readouterr().out
    shown = readme.read_text().partition("```text\n")[2].partition("```")[0]
    phrases = lambda text: set(" ".join(text.split("\n\n")[0].splitlines()[1:]).split("; "))  # noqa: E731
    assert phrases(shown) - {"..."} <= phrases(printed) and len(phrases(shown)) > 3
    assert 2 < len(ROW.findall(shown)) and set(ROW.findall(shown)) <= set(ROW.findall(printed))
    reasons = lambda text: {" ".join(TIME.sub("", x).split()) for x in text.partition("Left alone")[2].splitlines()}  # noqa: E731
    assert len(reasons(shown)) > 1 and reasons(shown) <= reasons(printed)

    monkeypatch.setattr(InductorCodegen, "emit", lambda self, *given: EagerCodegen().emit(*given))
    run_blocks(readme, blocks[1:], namespace)
    printed = capsys.readouterr().out
    assert "  <- fuse_attention" in printed and "<- normalization_pass_aten" in printed
    assert "no difference" in printed and (tmp_path / "report.html").exists() and (tmp_path / "report.json").exists()
