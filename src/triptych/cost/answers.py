"""Answers that the package brings: times measured on known devices, so that nobody waits for them again.

A file of `answers/` has the times of one device: `{"device": name, "answers": {question: seconds}}`. A device of the
same architecture gets them scaled by the two models: its cores are the same, and its memory is faster or slower.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .device import KNOWN, DeviceModel

FOLDER = Path(__file__).parent / "answers"

SAME_ARCHITECTURE = {"H200": "H200", "H100": "H200"}
"""Whose answers a device gets."""


def brought_answer(name: str, question: str, modelled: Callable[[DeviceModel], float]) -> float | None:
    """The seconds that a question takes on the device of that name; None if the package does not know."""
    own, like = (model_named(name), None)
    if own is None or own.name not in SAME_ARCHITECTURE:
        return None
    like = next(model for model in KNOWN if model.name == SAME_ARCHITECTURE[own.name])
    seconds = _answers(like.name).get(question)
    if seconds is None or own is like:
        return seconds
    of_like = modelled(like)
    return seconds * modelled(own) / of_like if of_like else seconds


def model_named(name: str) -> DeviceModel | None:
    """The known model of a device."""
    return next((model for model in KNOWN if model.name in name), None)


@functools.cache
def _answers(device: str) -> dict[str, float]:
    path = FOLDER / f"{device}.json"
    if not path.exists():
        return {}
    answers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dict(answers["answers"])
