"""What is known about the elements of a tensor: one number, a pattern of the index, a range, or every element.

The entry point is `knowledge(program)`. Read `affine.py` (patterns and conditions), `elements.py` (a tensor in pieces),
`patterns.py` and `arithmetic.py` (transfer functions of operations), `ranges.py`, `shape_only.py` (evaluation of
values that depend on shapes alone).
"""

from . import patterns  # noqa: F401  (registers the transfer functions of constructors, views and choices)
from .knowledge import Knowledge, knowledge

__all__ = ["Knowledge", "knowledge"]
