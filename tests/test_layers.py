"""The layers of the package: each may import only from itself and from those before it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import triptych

ROOT = Path(triptych.__file__).parent

LAYERS: list[tuple[str, ...]] = [
    ("errors", "releases", "options", "arguments"),
    ("_private",),
    ("ir",),
    ("cost",),
    ("match",),
    ("rewrite",),
    ("rules", "kernels", "pieces", "batching", "chunking", "communication", "attention"),
    ("pre_grad", "joint", "post_grad"),
    ("pipeline",),
    ("verify",),
    ("passes",),
    ("replay",),
    ("repro",),
    ("cache", "calling_convention", "codegen", "freezing", "partition", "weak_references", "fallback", "stages", "backend",
     "entry_point", "exported_programs", "spmd_check"),
    ("explaining",),
    ("testing",),
    ("cli_base", "cli_debug", "cli_doctor", "cli_passes", "cli_record", "cli", "__main__"),
]
PLACE = {name: number for number, layer in enumerate(LAYERS) for name in layer}

def imports() -> dict[str, dict[str, int]]:
    """How often each package, or module beside them, imports from each other one, at import time or later."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").parts
        if module == ("__init__",):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                above = module[: len(module) - node.level]
                names = [node.module.split(".")] if node.module else [[a.name] for a in node.names]
                for name in names:
                    imported = (*above, *name)[0]
                    if imported in PLACE:
                        found[module[0]][imported] += 1
    return {name: dict(counts) for name, counts in found.items()}


def test_every_module_has_a_layer():
    there = {p.stem if p.is_file() else p.name for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert there - {"__init__"} == set(PLACE)


def test_nothing_imports_upwards():
    graph = imports()
    for layer in LAYERS:  # shown by `pytest -s`
        for name in layer:
            print(f"{name:12}", ", ".join(f"{other} {count}" for other, count in sorted(graph.get(name, {}).items())))
    upwards = {
        name: above
        for name, others in graph.items()
        if (above := {other for other in others if PLACE[other] > PLACE[name]})
    }
    assert not upwards


def test_the_package_has_no_cycle_of_modules():
    """Layers still allow two modules of one layer to import each other; packages of one layer must not."""
    graph = imports()
    for layer in LAYERS:
        done: set[str] = set()
        waiting = set(layer)
        while ready := {n for n in waiting if not (graph.get(n, {}).keys() & waiting - {n})}:
            done |= ready
            waiting -= ready
        assert not waiting, f"{sorted(waiting)} import each other"
