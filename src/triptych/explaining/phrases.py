"""The words that the table and the page share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..passes.record import PassRecord

if TYPE_CHECKING:
    from .explanation import Explanation

CHANGED, FAILED = "●", "✗"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def place(record: PassRecord, program: int) -> str:
    """Where a pass ran: the stage, the graph if that says more, the captured program if not the first."""
    # the graph of a stage bears its name, and a graph inside that one begins with it
    says_it_all = not record.graph or record.graph.startswith(record.stage)
    where = (record.graph or record.stage) if says_it_all else f"{record.stage} {record.graph}"
    return where if program == 1 else f"{where}#{program}"


def title(explanation: Explanation) -> str:
    what = "training step" if explanation.train else "inference"
    return f"{explanation.model or 'model'}, {what}, compiled with {explanation.backend}"


def summary(explanation: Explanation) -> str:
    """One line: how much was captured and what became of it."""
    passes = explanation.passes
    changed = sum(record.changed for record in passes)
    parts = [
        count(len(explanation.sessions), "captured program"),
        f"{changed} of {count(len(passes), 'pass', 'passes')} changed something",
    ]
    if explanation.backend != "inductor":
        parts.append(count(explanation.rewrites, "rewrite"))
        parts.append(f"{count(explanation.declined, 'site')} left alone")
    return "; ".join([*parts, f"{duration(explanation.seconds)} in passes"])
