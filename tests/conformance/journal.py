"""Outcomes of tests on disk, one JSON object a line, so that an interrupted run can go on."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]
"""test, outcome (passed, failed, skipped, crashed, timed out), seconds, why; a failure has a traceback"""

BAD = ("failed", "crashed", "timed out")


class Journal:
    """Test -> outcome, each on disk as soon as it is known.

    The first line says what the outcomes depend on. Those of other sources are dropped.
    """

    def __init__(self, path: Path, sources: str, anew: bool = False) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.outcomes = {} if anew else read(path, sources)
        # written again even where it is taken up: its last line may be half-written
        lines = [{"sources": sources}, *self.outcomes.values()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def add(self, outcome: Outcome) -> None:
        with self.lock, self.path.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
            self.outcomes[outcome["test"]] = outcome


def read(path: Path, sources: str) -> dict[str, Outcome]:
    """The outcomes in a file, if they are those of these sources."""
    lines: list[Any] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # whoever wrote it was killed
    if not lines or lines[0].get("sources") != sources:
        return {}
    return {outcome["test"]: outcome for outcome in lines[1:]}
