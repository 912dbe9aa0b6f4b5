"""Declared examples and how they are run; everything a rule of one's own needs for its tests."""

from ..rewrite.examples import declines, fires
from .check import compare_graphs, run_example, run_pass

__all__ = ["compare_graphs", "declines", "fires", "run_example", "run_pass"]
