"""Small programs with in-place writes, for the examples of the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def then_write(result: Any, x: Any) -> Any:
    """A write that the result must see if it shares x's memory, and only then."""
    x.add_(1)
    return result * 2


def write_between(pieces: Any, x: Any, join: Callable[..., Any]) -> Any:
    """An in-place write between a split and a cat."""
    x.add_(1)
    return join(pieces)
