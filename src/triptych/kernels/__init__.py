"""Our operators, `torch.ops.triptych.*`: mostly Triton kernels, each with a form for any device.

Importing this registers the operators; Triton itself is imported when the first of them runs on a GPU.
"""

from __future__ import annotations

from . import (  # noqa: F401  (registers them)
    after,
    b2b_gemm,
    cat,
    dot_compress,
    group_linear,
    int_mm_mul,
    lce,
    nan_rows,
    norm_backward,
    parallel_linear,
    sum_parts,
)
from .registry import on_gpu, triton_is_there

__all__ = ["on_gpu", "triton_is_there"]
