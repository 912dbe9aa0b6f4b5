"""Private torch names live in one file, and what this package replaces is never imported by it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import triptych
from tests.releases import RELEASES
from triptych import _private, releases

pytestmark = pytest.mark.fast

PACKAGE = Path(_private.__file__).parent
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "_private.py"]


def private_names(path: Path) -> list[str]:
    """Imports of torch's private modules, and `torch._something` wherever it is written out.

    `torch._assert` and `torch._assert_async` are in users' programs, and so in examples.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if re.match(r"torch(\.\w+)*\._\w+", a.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
            found += [n for n in names if re.match(r"torch(\.\w+)*\._\w+", n)]
        elif isinstance(node, ast.Attribute) and re.match(r"_(?!_|assert)", node.attr):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                found.append(f"torch.{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_private_torch_in_one_file(path):
    assert private_names(path) == []


def test_the_search_finds_what_it_looks_for(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import torch\nfrom torch._ops import OpOverload\nimport torch.utils._pytree\nx = torch._C\n")
    assert len(private_names(bad)) == 3


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_inductors_own_passes_are_not_imported(path):
    assert not re.search(r"^[^#\n]*torch\._inductor\.(fx_passes|pattern_matcher)", path.read_text(), re.MULTILINE)


def test_every_private_name_is_there_in_this_torch():
    assert _private.missing() == []


def test_a_missing_name_is_an_error_that_says_which_releases_have_it(monkeypatch):
    monkeypatch.setattr(_private, "NAMES", {"gone": "torch._inductor.no_such_module:name", "pytree": "torch.utils._pytree"})
    with pytest.raises(triptych.UnsupportedTorch, match=r"torch\._inductor\.no_such_module\.name.*torch 2\.11 to 2\.15"):
        _ = _private.gone
    with pytest.raises(AttributeError):
        _ = _private.no_such_row


def test_an_old_torch_is_refused_at_import_and_a_new_one_before_the_first_compile(monkeypatch):
    names = {"gone": "torch:_no_such_name", "other": "torch:_another", "pytree": "torch.utils._pytree"}
    monkeypatch.setattr(_private, "NAMES", names)
    _private.check_names()  # a release that the tests have looked at: nothing is imported to find out
    monkeypatch.setattr(_private, "is_newer_than_tested", lambda: True)
    with pytest.raises(ImportError, match=r"torch\._no_such_name, torch\._another"):
        _private.check_names()
    old = "import torch; torch.__version__ = '2.10.1+cpu'; import triptych"
    run = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert "UnsupportedTorch: this is torch 2.10.1+cpu; Triptych needs torch 2.11 to 2.15" in run.stderr


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", (2, 13)), ("2.9.1", (2, 9)), ("2.16.0a0+git12", (2, 16)), ("3.0", (3, 0))]
)
def test_release_of_a_version(version, release):
    assert releases.release_of(version) == release
    assert releases.is_newer_than_tested(version) == (release > (2, 15))


def test_the_releases_in_the_text_are_those_in_the_numbers():
    oldest, newest = (".".join(map(str, numbers)) for numbers in (releases.OLDEST, releases.NEWEST))
    assert releases.SUPPORTED == f"torch {oldest} to {newest}"
    assert (RELEASES[0], RELEASES[-1]) == (oldest, newest)
    readme = (PACKAGE.parent.parent / "README.md").read_text()
    assert f"torch {oldest} to {newest}" in readme


def test_files_can_be_read_in_one_go():
    long = {p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 450}
    assert not long
