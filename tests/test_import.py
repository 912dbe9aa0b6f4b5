"""What `import triptych` loads: next to nothing, until a name is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import triptych


def run(program: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


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


def test_a_program_from_the_cache_loads_the_passes_of_stage_1_alone(tmp_path):
    """The other stages do not run over it, so a second process need not import their passes."""
    program = """
import sys, torch
f = torch.compile(lambda x: (x + 1).relu(), backend="triptych")
assert torch.equal(f(torch.zeros(8)), torch.ones(8))
print(*[name for name in sys.modules if name.startswith("triptych.")])
"""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (set(run(program, environment).split()) for _ in range(2))
    assert {"triptych.pre_grad.fuse_attention", "triptych.pipeline.joint", "triptych.pipeline.post_grad"} <= first
    assert "triptych.pre_grad.fuse_attention" in second
    assert not [name for name in second if name.startswith(("triptych.joint", "triptych.post_grad", "triptych.chunking"))]
    assert not {"triptych.pipeline.joint", "triptych.pipeline.post_grad", "triptych.explaining", "rich", "click"} & second


def test_stages_are_listed_before_their_passes_are_imported():
    program = """
import sys
from triptych.pipeline import STAGES, stage_entries
print(*STAGES)
assert not [name for name in sys.modules if name.startswith(("triptych.pre_grad", "triptych.joint", "triptych.post_grad"))]
assert "joint" in STAGES and "no stage" not in STAGES
assert "triptych.post_grad" not in sys.modules
from triptych.pipeline import FAMILIES, POST_GRAD
assert stage_entries("post_grad") == tuple(POST_GRAD) and set(FAMILIES["POST_GRAD_FUSIONS"]) <= set(POST_GRAD)
"""
    stages = "pre_grad freeze joint before_partition after_partition post_grad before_codegen"
    assert run(program).strip() == stages
