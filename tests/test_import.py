"""What `import triptych` loads: next to nothing, until a name is asked for."""

from __future__ import annotations

import subprocess
import sys

import triptych


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_the_import_alone_loads_nothing():
    loaded = run(
        "import torch, sys; before = set(sys.modules); import triptych; "
        "print(*sorted(set(sys.modules) - before))"
    )
    ours = {name.split(".")[1] for name in loaded.split() if name.startswith("triptych.")}
    assert ours == {"_private", "errors", "kernels", "releases"}
    assert not [name for name in loaded.split() if name.startswith(("sympy", "torch._dynamo", "torch._inductor"))]


def test_a_compile_loads_no_test_harness():
    loaded = run("import torch, sys, triptych; triptych.compile_fx; triptych.explain; print(*sys.modules)").split()
    assert "triptych.backend" in loaded
    assert not [name for name in loaded if name.startswith(("triptych.testing", "pytest", "hypothesis"))]


def test_every_public_name_is_there():
    assert set(triptych.__all__) == set(triptych._HOME_OF)
    assert {*triptych.__all__} <= {*dir(triptych)}
    for name in triptych.__all__:
        assert getattr(triptych, name).__name__ == name


def test_explain_is_the_function_whatever_was_imported_before():
    assert run("import triptych.explaining.bisect, triptych; print(callable(triptych.explain))").strip() == "True"


def test_no_random_number_of_the_caller_is_drawn():
    """Neither by the import nor by looking at all examples, some of which have modules with drawn weights."""
    program = """
import torch
before = torch.get_rng_state()
import triptych
triptych.compile_fx, triptych.explain
assert torch.equal(before, torch.get_rng_state()), "by the import"
from triptych.testing.subjects import subjects
assert sum(len(subject.examples) for subject in subjects()) > 1000
assert torch.equal(before, torch.get_rng_state()), "by the examples"
"""
    run(program)
