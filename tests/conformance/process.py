"""The driver's side of a worker: a process that runs one test after another, and may crash or hang."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .journal import Outcome

WORKER = Path(__file__).parent / "worker.py"
SOURCES = Path(__file__).parents[2] / "src"
"""The package of this checkout, installed or not."""

START = 300
"""Seconds that a worker may take to import torch and the tests."""


class WorkerProcess:
    """A worker, and the pipe that its answers come through."""

    def __init__(self, file: Path, mode: str, log: Path) -> None:
        reading, writing = os.pipe()
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), str(file), mode, str(writing)],
                env=os.environ | {"PYTHONPATH": f"{SOURCES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                start_new_session=True,  # so that whatever a test starts ends with it
                text=True,
            )
        os.close(writing)
        self.answers, self.pending = reading, b""
        try:
            self.hello = self._answer(START)
            if self.hello is None:
                self.process.wait(START)  # it has yet to write why into the log
        except (TimeoutError, subprocess.TimeoutExpired):
            self.hello = None
        if self.hello is None:
            self.end()
            raise RuntimeError(f"the tests could not be loaded; see {log}")

    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, name: str, timeout: float) -> Outcome:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            answer = self._answer(timeout)
        except TimeoutError:
            self.end()
            return {"test": name, "outcome": "timed out", "seconds": timeout, "why": f"after {timeout:.0f} s"}
        except BrokenPipeError:
            answer = None
        if answer is None:
            self.process.wait()
            code = self.process.returncode
            self.end()
            return {"test": name, "outcome": "crashed", "seconds": 0, "why": f"exit {code}"}
        return answer

    def _answer(self, timeout: float) -> Any:
        """The next line from the worker; None if it has ended."""
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.answers], [], [], timeout)
            if not ready:
                raise TimeoutError
            piece = os.read(self.answers, 1 << 20)
            if not piece:
                return None
            self.pending += piece
        line, self.pending = self.pending.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        if self.answers >= 0:
            os.close(self.answers)
            self.answers = -1
