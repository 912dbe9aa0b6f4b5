"""What is known about the elements of a tensor: one number, a pattern of the index, a range, or all of them.

`knowledge(program)` answers. Read `affine.py` (patterns and conditions), `elements.py` (a tensor in pieces),
`patterns.py` and `arithmetic.py` (what operations make of them), `ranges.py`, `shape_only.py` (evaluated for real).
"""

from . import patterns  # noqa: F401  (says what constructors, views and choices make)
from .knowledge import Knowledge, knowledge

__all__ = ["Knowledge", "knowledge"]
