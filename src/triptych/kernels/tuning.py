"""What the Triton kernels share: which configurations are tried, and for which sizes they are tried anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def configs(choices: Sequence[tuple[dict[str, int], int, int]]) -> list[Any]:
    """(blocks, warps, stages) as Triton wants them; the interpreter cannot measure and takes the first."""
    made = [triton.Config(blocks, num_warps=warps, num_stages=stages) for blocks, warps, stages in choices]
    return made[:1] if INTERPRETED else made


def bucket(size: int) -> int:
    """Sizes up to the next power of two are tuned as one: a growing batch is not measured at every step."""
    return 1 << max(size - 1, 0).bit_length()
