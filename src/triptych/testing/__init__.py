"""Declared examples and how they are run: everything that is needed to test a user's own rule."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..rewrite.examples import declines, fires

if TYPE_CHECKING:
    from .check import compare_graphs, run_example, run_pass

__all__ = ["compare_graphs", "declines", "fires", "run_example", "run_pass"]


def __getattr__(name: str) -> Any:
    """Imports lazily: the functions that run examples need the pipeline, and a pass in the pipeline may import `fires`
    and `declines` from here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(".check", __name__), name)
    return value
