"""How much work passes do, counted in lines of Python that run: the same on every machine, and under any load."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch.fx

import triptych
from triptych.passes.manager import _StageRunner

COUNTED = (str(Path(triptych.__file__).parent), str(Path(torch.fx.__file__).parent))
"""Where lines count: our package, and what it calls of torch.fx. A loop over a graph is seen in either."""


class Work:
    """Lines run inside passes, by pass and function."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, CodeType]] = Counter()

    @contextlib.contextmanager
    def count(self, where: str) -> Iterator[None]:
        lines = self.lines

        def enter(frame: FrameType, event: str, arg: Any) -> Any:
            code = frame.f_code
            if not code.co_filename.startswith(COUNTED):
                return None
            key = (where, code)

            def line(frame: FrameType, event: str, arg: Any) -> Any:
                if event == "line":
                    lines[key] += 1
                return line

            return line

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def by_function(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (where, code), lines in self.lines.items():
            place = Path(code.co_filename)
            counts[f"{where}: {place.parent.name}/{place.name} {code.co_qualname}" if hasattr(code, "co_qualname") else f"{where}: {place.parent.name}/{place.name}:{code.co_firstlineno} {code.co_name}"] += lines
        return counts


@contextlib.contextmanager
def counting_passes() -> Iterator[Work]:
    """Count the lines that every pass of every stage runs."""
    work = Work()
    run_pass = _StageRunner.run_pass

    def counted(self: _StageRunner, pass_: Any, before: Any) -> None:
        with work.count(f"{self.stage}/{pass_.name}"):
            run_pass(self, pass_, before)

    with mock.patch.object(_StageRunner, "run_pass", counted):
        yield work
