"""A limit on the rewrites of a whole process, set by environment variables: `triptych bisect --check COMMAND` uses it.

`TRIPTYCH_REWRITE_LIMIT=n`: the process makes its first n rewrites and no more, over all programs it compiles.
`TRIPTYCH_REWRITE_REPORT=path`: every compile that begins, and every pass that rewrote something, appends a line of JSON
to that file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ..errors import TriptychError
from .record import PassRecord

LIMIT = "TRIPTYCH_REWRITE_LIMIT"
REPORT = "TRIPTYCH_REWRITE_REPORT"


@dataclass
class RewriteCount:
    """The number of rewrites so far."""

    made: int = 0
    stopped: bool = False
    """The limit has refused a rewrite, so there will be no more."""


count_of_process = RewriteCount()


def limit_of_process() -> int | None:
    text = os.environ.get(LIMIT, "")
    if not text:
        return None
    if not text.isdigit():
        raise TriptychError(f"{LIMIT} is a number of rewrites, not {text!r}")
    return int(text)


def reporting() -> bool:
    return bool(os.environ.get(REPORT))


def report_compile() -> None:
    """Tell whoever started this process that it compiles a program, which may need no rewrite."""
    if reporting():
        _append({"process": os.getpid(), "compile": True})


def report(record: PassRecord, limit: int | None) -> None:
    """Tell whoever started this process what a pass did: at once, since the process may end at any time."""
    if not reporting() or not record.rewrites:
        return
    data: dict[str, Any] = {
        "process": os.getpid(),
        "ordinal": record.ordinal,
        "rewrites": record.rewrites,
        "stage": record.stage,
        "pass": record.name,
        "graph": record.graph,
        "fired": dict(record.fired),
    }
    if limit is not None and record.ordinal + record.rewrites >= limit:  # the last pass: its listings are needed
        data |= {"before": record.before, "after": record.after}
    _append(data)


def _append(data: dict[str, Any]) -> None:
    with open(os.environ[REPORT], "a", encoding="utf-8") as file:
        file.write(json.dumps(data) + "\n")
