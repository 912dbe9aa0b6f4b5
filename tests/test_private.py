"""Private torch names live in one file, and what this package replaces is never imported by it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from triptych import _private

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


def test_files_can_be_read_in_one_go():
    long = {p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 450}
    assert not long
