"""What the Triton kernels share: which configurations are tried, and for which sizes they are tried anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import triton

from ..cost import measuring_allowed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def configs(choices: Sequence[tuple[dict[str, int], int, int]]) -> list[Any]:
    """(blocks, warps, stages) as Triton wants them; the interpreter cannot measure and takes the first."""
    made = [triton.Config(blocks, num_warps=warps, num_stages=stages) for blocks, warps, stages in choices]
    return made[:1] if INTERPRETED else made


def bucket(size: int) -> int:
    """Sizes up to the next power of two are tuned as one: a growing batch is not measured at every step."""
    return 1 << max(size - 1, 0).bit_length()


_BEST: dict[Any, dict[str, Any]] = {}


def run_tuned(kernel: Any, key: tuple[Any, ...], grid: Any, *args: Any, **constants: Any) -> None:
    """Launch a kernel, with the configuration found for such sizes: Triton's tuner looks at every argument anew on
    every call, which for a small kernel takes longer than the kernel. Where nothing may depend on a measurement the
    first configuration is taken."""
    best = _BEST.get((kernel, key)) if measuring_allowed() else kernel.configs[0].all_kwargs()
    if best is None:
        kernel[grid](*args, **constants)
        _BEST[kernel, key] = kernel.best_config.all_kwargs()
    else:
        kernel.fn[grid](*args, **constants, **best)
