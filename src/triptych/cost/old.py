"""Transitional: what rules that still give seconds use. Goes when the last of them describes its work."""

from __future__ import annotations

from typing import Any

from .decision import Decision
from .parts import MODEL_ERROR


def decide(before: float, after: float, tune: str, sure: bool = False, *, measure: Any = None,
           error: float = MODEL_ERROR, saves: int = 0, by_name: bool = False) -> Decision:  # fmt: skip
    is_unsure = not (sure or by_name) and before < error * after and after < error * before
    if measure is not None and (tune == "all" or (tune == "unsure" and is_unsure)):
        if (times := measure()) is not None:
            return Decision(times[0], times[1], measured=True, saves=saves, by_name=by_name)
    return Decision(before, after, sure=sure, saves=saves, by_name=by_name)
