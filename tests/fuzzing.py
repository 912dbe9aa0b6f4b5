"""How many random programs a test tries, and how hypothesis chooses them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

COUNT = os.environ.get("FUZZ_PROGRAMS")
"""`FUZZ_PROGRAMS=5000 pytest tests/test_fuzz.py` looks for new programs; otherwise they are the same every time."""
QUICK = settings(
    max_examples=int(COUNT or 40),
    derandomize=COUNT is None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def choose_from(data):
    return lambda below: data.draw(st.integers(0, max(below, 1) - 1))
