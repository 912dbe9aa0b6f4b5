"""How much work passes do, counted in lines of Python that run: the same on every machine, and under any load."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch.fx

import triptych
from triptych.ir.program import Program
from triptych.passes.manager import _StageRunner

COUNTED = (str(Path(triptych.__file__).parent), str(Path(torch.fx.graph.__file__)), str(Path(torch.fx.node.__file__)))
"""Where lines count: our package, and what it calls of torch.fx. A loop over a graph is seen in either."""

FACT = 100
"""What computing one fact counts, in lines: all that torch does for it is not looked at."""

MOST_GROWTH = 2.5
"""What the work may grow by when the program doubles: a little more than 2, and far less than the 4 of a square."""


@contextlib.contextmanager
def counting_passes() -> Iterator[Counter[str]]:
    """Count the lines that every pass of every stage runs, by `stage/pass`."""
    lines: Counter[str] = Counter()
    run_pass, compute = _StageRunner.run_pass, Program.compute

    def counted_pass(self: _StageRunner, pass_: Any, *rest: Any) -> None:
        key = f"{self.stage}/{pass_.name}"

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            lines[key] += event == "line"
            return line

        def call(frame: FrameType, event: str, arg: Any) -> Any:
            return line if frame.f_code.co_filename.startswith(COUNTED) else None

        def counted_compute(*args: Any, **kwargs: Any) -> Any:
            lines[key] += FACT
            sys.settrace(None)
            try:
                return compute(*args, **kwargs)
            finally:
                sys.settrace(call)

        before = sys.gettrace()
        with mock.patch.object(Program, "compute", counted_compute):
            sys.settrace(call)
            try:
                run_pass(self, pass_, *rest)
            finally:
                sys.settrace(before)

    with mock.patch.object(_StageRunner, "run_pass", counted_pass):
        yield lines


def grows(small: Counter[str], large: Counter[str]) -> dict[str, str]:
    """Passes, and all together, whose work grows too fast; passes that do next to nothing are left out."""
    small["all"], large["all"] = small.total(), large.total()
    return {
        name: f"{small[name]} -> {lines} lines"
        for name, lines in large.items()
        if lines > MOST_GROWTH * small[name] and lines > 0.02 * large["all"]
    }
