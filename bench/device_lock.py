"""Timing has the machine to itself, while other processes may compile together: three file locks.

`device` is shared by those who compile and exclusive to the one who measures. `turn` gives those who wait to measure
precedence: they share it, and whoever wants to start compiling must own it for a moment. `tuning` is exclusive to the
one whose compiler times kernels, to choose among them. All are released when a process ends, whatever the way.
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
        """`patient`: without precedence, when nobody compiles any more."""
        with contextlib.nullcontext() if patient else _locked(self._turn, fcntl.LOCK_SH):
            with _locked(self._device, fcntl.LOCK_EX):
                yield

    @contextlib.contextmanager
    def tuning(self) -> Iterator[None]:
        """While compiling: kernels that others time at the same moment would make the choice one of chance."""
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
