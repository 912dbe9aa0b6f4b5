"""Kernels for a GPU are compiled on a machine without one, with builds of torch that can: those of `make releases`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_code import OPERATORS

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="needs a build of torch for CUDA, and no GPU"
)

FIRES = {
    "group_batch_fusion_passes": "batch_linear",
    "fuse_parallel_linear_pass": "own_pointers",
    "pad_mm": "pad_mm",
    "B2B_GEMM_PASS": "fused_products",
    "fused_int_mm_mul": "fused_int_mm_mul",
    "reduced_atomic_contention": "spread_additions",
    "sink_cat_after_pointwise": "sink_join",
}
"""Workloads of passes, and a rule that fires in each if what is timed says that it pays. Attention is not among them:
torch finds no kernel for it without a GPU."""
WITH_OUR_KERNELS = ("fuse_parallel_linear_pass", "B2B_GEMM_PASS", "fused_int_mm_mul", *OPERATORS)


def test_inductor_and_triton_compile_what_the_passes_write(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu_code", *FIRES, *OPERATORS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src:bench", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    compiled = {line["workload"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert [name for name, rule in FIRES.items() if not compiled[name]["fired"].get(rule)] == []
    assert [name for name, line in compiled.items() if line["warnings"]] == []
    assert [name for name in WITH_OUR_KERNELS if not compiled[name]["fired"].get("launched_kernel")] == []
    assert all(line["kernels"] for line in compiled.values())
    # a launch of a kernel multiplies as much as the operator in whose place it is
    products = {name: compiled[name]["products"] for name in WITH_OUR_KERNELS}
    assert [name for name, graphs in products.items() if any(before != after for before, after in graphs)] == []
    assert all(products[name][0][0] > 0 for name in ("fuse_parallel_linear_pass", "B2B_GEMM_PASS", "fused_int_mm_mul"))
