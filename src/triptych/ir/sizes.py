"""Sizes as plain numbers, for estimates only: the correctness of a rewrite must not depend on them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .facts import number

UNKNOWN_SIZE = 64
"""Assumed for a symbolic size without a hint."""


def size_hint(size: Any) -> int:
    """A size as the number it had when the program was captured; adds no guard."""
    size = number(size)
    if isinstance(size, torch.SymInt):
        size = size.node.hint if size.node.has_hint() else UNKNOWN_SIZE
    return int(size)


def elements(shape: Iterable[Any]) -> int:
    return math.prod(size_hint(s) for s in shape)


def bytes_of(tensor: torch.Tensor) -> int:
    return elements(tensor.shape) * tensor.dtype.itemsize
