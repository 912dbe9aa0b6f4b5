"""Declared examples and how they are run; everything a rule of one's own needs for its tests."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..rewrite.examples import declines, fires

if TYPE_CHECKING:
    from .check import compare_graphs, run_example, run_pass

__all__ = ["compare_graphs", "declines", "fires", "run_example", "run_pass"]


def __getattr__(name: str) -> Any:
    """What runs examples needs the pipeline, and a pass in the pipeline may take `fires` and `declines` from here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(".check", __name__), name)
    return value
