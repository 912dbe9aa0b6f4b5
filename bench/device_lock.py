"""Three file locks: a process that measures has the machine to itself, while several may compile at the same time.

`device` is shared by processes that compile, and exclusive to the one that measures. `turn` gives precedence to
processes that wait to measure: they hold it shared, and a process must hold it exclusively for a moment before it
starts to compile. `tuning` is exclusive to the process whose compiler is timing kernels to choose among them. All locks
are released when a process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import tempfile
from collections.abc import Iterator
from pathlib import Path


class DeviceLock:
    def __init__(self, device: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir())
        name = f"triptych-bench-{getpass.getuser()}-{device}"
        self._device, self._turn, self._tuning = (folder / f"{name}.{lock}" for lock in ("device", "turn", "tuning"))

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with _locked(self._turn, fcntl.LOCK_EX):
                stack.enter_context(_locked(self._device, fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def measuring(self, patient: bool = False) -> Iterator[None]:
        """Hold the device exclusively. `patient`: without precedence, so only when no process compiles any more."""
        with contextlib.nullcontext() if patient else _locked(self._turn, fcntl.LOCK_SH):
            with _locked(self._device, fcntl.LOCK_EX):
                yield

    @contextlib.contextmanager
    def tuning(self) -> Iterator[None]:
        """Time kernels while compiling: if others timed kernels at the same moment, the choice would be random."""
        with _locked(self._tuning, fcntl.LOCK_EX):
            yield


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked compile worker has the file open too
