"""`TRIPTYCH_REPORT=dir`: every process that compiles leaves a report of all its compiles in that directory.

`dir/train-4711.html` is the page of the script `train.py` with process id 4711, `dir/train-4711.json` the same as data.
They are written at the end of the process, and before that also after compiles, as long as this takes less than a
tenth of the time, so that a process that is killed, or crashes in a kernel, leaves a report, too. A file is replaced as
a whole or not at all.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import warnings
from pathlib import Path

from .. import _private
from .record import Recording, program_name

VARIABLE = "TRIPTYCH_REPORT"
SHARE_OF_TIME = 0.1
"""The share of the process's time that may be spent on writing before its end."""
LONGEST_WAIT = 10.0
"""Seconds to wait, at the end, for another thread that is still compiling."""


log = logging.getLogger("triptych")


class ReportAtExit:
    """Records this process and writes its report."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._failed = False
        self._begin()

    def _begin(self) -> None:
        self._writing = threading.Lock()
        self._next_write = 0.0
        self.recording = Recording(program_name())
        self.recording.recorder.on_compiled = self._compiled
        self.recording.start()

    def begin_again(self) -> None:
        """In the child of a fork: what the parent compiled is in the parent's report."""
        self.recording.abandon()
        self._begin()

    @property
    def stem(self) -> str:
        name = Path(program_name()).stem
        return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}-{os.getpid()}"

    def _is_empty(self) -> bool:
        return not (self.recording.sessions or self.recording.frames)

    def write(self) -> None:
        """Write page and data. Whatever goes wrong is one warning: the program must not notice."""
        if self._failed or self._is_empty():
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            from .page import page

            replace_file(self.directory / f"{self.stem}.json", self.recording.to_json())
            replace_file(self.directory / f"{self.stem}.html", page(self.recording))
        except Exception as error:
            self._failed = True
            what = f"{VARIABLE}: no report of this process in {self.directory}: {type(error).__name__}: {error}"
            try:
                warnings.warn(what, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:  # the user has made warnings errors
                log.warning("%s", what)

    def _compiled(self) -> None:
        """Write after a graph has been compiled, because running it may crash the process."""
        if time.monotonic() < self._next_write or not self._writing.acquire(blocking=False):
            return
        try:
            began = time.monotonic()
            self.write()
            ended = time.monotonic()
            self._next_write = ended + (ended - began) / SHARE_OF_TIME
        finally:
            self._writing.release()

    def at_exit(self) -> None:
        if self._failed or self._is_empty():
            return
        # no thread shall add to what is being written; one that hangs must not keep the process from ending
        waited = _private.compile_lock.acquire(timeout=LONGEST_WAIT)
        try:
            with self._writing:
                self.write()
        finally:
            if waited:
                _private.compile_lock.release()


def replace_file(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def start(directory: str) -> ReportAtExit:
    """Record this process, and its forks, from now on."""
    report = ReportAtExit(directory)
    atexit.register(report.at_exit)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=report.begin_again)
    return report
