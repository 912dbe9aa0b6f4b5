"""What a stage is made of: passes, and points at which the user's own run."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import ADD_RULES
from ..rewrite.passes import Pass


@dataclass(frozen=True)
class Hook:
    """A point at which the user's own passes or rules run."""

    name: str

    def purpose(self) -> str:
        if self.name == ADD_RULES:
            return "your own rules, if their `stages` name this one"
        return "your own passes, in the order given"


Entry = type[Pass] | Hook
