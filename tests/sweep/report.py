"""What a sweep gave: one line of JSON for each operator and dtype as it comes, and a summary."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from .judge import CRASHED, EQUAL, REFUSED, SKIPPED, WRONG
from .workers import UnitResult

ORDER = (CRASHED, WRONG, REFUSED, EQUAL, SKIPPED)
"""An operator counts as the first of these that one of its programs is."""


@dataclass
class Summary:
    programs: Counter[str] = field(default_factory=Counter)
    left_to_eager: int = 0
    operators: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, result: UnitResult) -> None:
        key = (result.unit.database, result.unit.name)
        for finding in result.findings:
            self.programs[finding.status] += 1
            self.left_to_eager += not finding.captured
            worst = self.operators.get(key, finding.status)
            self.operators[key] = min(worst, finding.status, key=ORDER.index)

    @property
    def failed(self) -> bool:
        return bool(self.programs[WRONG] or self.programs[CRASHED])

    def lines(self) -> list[str]:
        by_operator = Counter(self.operators.values())
        return [
            _counts("operators", len(self.operators), by_operator),
            _counts("programs ", self.programs.total(), self.programs)
            + f"; {self.left_to_eager} of the equal ones left to eager by Dynamo",
        ]


def _counts(what: str, tried: int, counts: Counter[str]) -> str:
    return (
        f"{what}: {tried} tried, {counts[EQUAL]} equal, {counts[REFUSED]} refused by torch itself, "
        f"{counts[WRONG]} wrong, {counts[CRASHED]} crashed, {counts[SKIPPED]} that eager cannot run"
    )


class ResultFile:
    """One line a unit, flushed as it comes, so that nothing is lost when the sweep is interrupted."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: IO[str] = path.open("w")

    def add(self, result: UnitResult) -> None:
        record = {
            **asdict(result.unit),
            "seconds": round(result.seconds, 2),
            "counts": dict(Counter(f.status for f in result.findings)),
            "findings": [asdict(f) for f in result.findings if f.status != EQUAL],
        }
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self, summary: Summary) -> None:
        record = {
            "summary": {
                "operators": len(summary.operators),
                "operators_by_status": dict(Counter(summary.operators.values())),
                "programs": summary.programs.total(),
                "programs_by_status": dict(summary.programs),
                "left_to_eager": summary.left_to_eager,
            }
        }
        self.file.write(json.dumps(record) + "\n")
        self.file.close()
