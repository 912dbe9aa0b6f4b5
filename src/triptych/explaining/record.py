"""Watch a real program: every compile of the process, while it runs as it always does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..passes.session import Recorder, add_recorder, remove_recorder
from .explanation import Explanation
from .frames import Frame, FrameLog


class RecordedRun(Explanation):
    """What a real run has compiled."""

    recorded = True


class Recording(RecordedRun):
    """An explanation that fills as the program compiles: print it, or write it as a page, at any time.

    The backward of a program that was compiled inside `record()` is added whenever it is compiled, also later.
    """

    def __init__(self, model: str = "") -> None:
        self.recorder = Recorder()
        self._log = FrameLog()
        super().__init__(self.recorder.sessions, model=model)

    @property
    def frames(self) -> list[Frame]:
        return self._log.frames

    @property
    def train(self) -> bool:
        """Was a backward compiled?"""
        return any(record.graph == "backward" for session in self._collected for record in list(session.records))

    def snapshot(self) -> RecordedRun:
        """What has been compiled until now; what follows does not change it."""
        sessions = [replace(session, records=list(session.records)) for session in self.sessions]
        return RecordedRun(sessions, train=self.train, model=self.model, frames=self.frames)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle contains what has been compiled until now."""
        return _unchanged, (self.snapshot(),)

    def start(self) -> None:
        self._log.start()
        add_recorder(self.recorder)

    def stop(self) -> None:
        remove_recorder(self.recorder)
        self._log.stop()


    def abandon(self) -> None:
        """Stop without waiting for a lock: in the child of a fork, the thread that holds it does not exist."""
        remove_recorder(self.recorder)
        self._log.detach()


def _unchanged(run: RecordedRun) -> RecordedRun:
    return run


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record every compile of the process, in all threads, until the block ends::

        with triptych.record() as exp:
            train()
        exp.to_html("report.html")

    It collects the programs that `backend="triptych"` compiles, their backward graphs, and calls of `pre_grad_passes`,
    `joint_graph_passes` and `post_grad_passes`. For every function that Dynamo compiles, with whatever backend, it
    collects why the function was compiled again and where its graph breaks. What `explain`, `bisect` and `why_not`
    compile is left out.

    The program runs as without it, except that no compiled graph is loaded from a cache.
    """
    recording = Recording(program_name())
    recording.start()
    try:
        yield recording
    finally:
        recording.stop()


def program_name() -> str:
    """The script that runs, for titles and file names."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return name or "program"
