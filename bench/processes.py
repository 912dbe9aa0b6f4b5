"""Runs each case of the suite in a separate process: starts it, reads its reports, and ends it if it takes too long."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Case = tuple[str, str]
"""A model and a mode, by name."""
Record = dict[str, Any]
Command = Callable[[Case, str], list[str]]
"""The command that measures a case, given a folder for what it compiles."""

ENVIRONMENT = {
    "TRIPTYCH_ON_ERROR": "raise",  # a failed compile is reported, not timed as a fallback
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WAITING, MEASURING = "waiting", "measuring"


@dataclass
class Settings:
    command: Command
    workers: int
    time_limit: float
    """Seconds a case may take, waiting for the device not counted."""
    logs: Path
    stop_after: float = math.inf
    """Seconds after which no further case is started."""
    on_change: Callable[[Sequence[Child]], None] = lambda running: None
    """Called again and again with the running cases."""


def run_all(cases: Sequence[Case], settings: Settings) -> Iterator[Record]:
    """The records of all cases, each as soon as its process has ended.

    Processes start in waves. All processes of a wave compile together, and measure one after the other when none
    compiles any more: a measurement in between would stop all others.
    """
    left, running = list(cases), []
    last_start = time.monotonic() + settings.stop_after
    events: queue.Queue[tuple[Child, dict[str, Any] | None]] = queue.Queue()
    try:
        while left or running:
            if time.monotonic() >= last_start:
                left.clear()
            if not running:
                running = [Child(case, settings, events) for case in left[: settings.workers]]
                del left[: settings.workers]
            try:
                child, event = events.get(timeout=0.2)
            except queue.Empty:
                pass
            else:
                if event is None:
                    running.remove(child)
                    yield child.ended()
                else:
                    child.take(event)
            settings.on_change(running)
            for child in running:
                if child.clock.seconds() > settings.time_limit:
                    child.stop(f"more than {settings.time_limit:g} s")
    finally:
        for child in running:
            child.stop("interrupted")
            child.ended()


class BusyClock:
    """Seconds since the start, without those spent waiting."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._busy, self._since = now, 0.0, now()
        self.state = "starting"

    def enter(self, state: str) -> None:
        self._busy, self._since, self.state = self.seconds(), self._now(), state

    def seconds(self) -> float:
        return self._busy + (self._now() - self._since if self.state != WAITING else 0.0)


@dataclass
class Child:
    """A running case, and what it has reported."""

    case: Case
    settings: Settings
    events: queue.Queue[Any]
    record: Record = field(default_factory=dict)
    clock: BusyClock = field(default_factory=BusyClock)

    def __post_init__(self) -> None:
        self.record = {"model": self.case[0], "mode": self.case[1], "variants": {}}
        self._scratch = tempfile.TemporaryDirectory(prefix="triptych-bench-", ignore_cleanup_errors=True)
        self.settings.logs.mkdir(parents=True, exist_ok=True)
        self._log = self.settings.logs / f"{'-'.join(self.case)}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self.settings.command(self.case, self._scratch.name), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=self._environment(), start_new_session=True,
            )  # fmt: skip
        self._stopped: str | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _environment(self) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // self.settings.workers)
        return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ, **ENVIRONMENT}

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.put((self, json.loads(line)))
        self.events.put((self, None))

    def take(self, event: dict[str, Any]) -> None:
        """Record what the process reports."""
        if "state" in event:
            self.clock.enter(event["state"])
        elif "variant" in event:
            self.record["variants"].setdefault(event["variant"], {}).update(event["figures"])
        else:
            self.record.update(event)

    @property
    def state(self) -> str:
        return self.clock.state

    def stop(self, reason: str) -> None:
        """End the process and those that it started."""
        self._stopped = self._stopped or reason
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def ended(self) -> Record:
        """The record of a process that has ended, with its status and the reason for it."""
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._scratch.cleanup()
        record = self.record
        failures = any("failure" in figures for figures in record["variants"].values())
        if "skipped" in record:
            record["status"], record["reason"] = "skipped", record.pop("skipped")
        elif self._stopped:
            record["status"], record["reason"] = "timed out", f"{self._stopped}, {self.state}"
        elif code or not record.pop("finished", False):
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            record["status"], record["reason"] = "crashed", f"{how}, {self.state}; {self._last_words()}"
        else:
            record["status"], record["reason"] = "failed" if failures else "measured", ""
        record["seconds"] = round(self.clock.seconds(), 1)
        if record["status"] in ("measured", "skipped"):
            self._log.unlink()
        return record

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "nothing in its log"


def measuring(device: str, variants: Callable[[str], Sequence[str]], rounds: int) -> Command:
    """The command that measures a case; `variants` says which variants a mode has."""

    def command(case: Case, scratch: str) -> list[str]:
        model, mode = case
        return [
            sys.executable, str(Path(__file__).with_name("one_model.py")), model, mode, "--device", device,
            "--variants", ",".join(variants(mode)), "--rounds", str(rounds), "--scratch", scratch, "--supervised",
        ]  # fmt: skip

    return command
