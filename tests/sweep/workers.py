"""Worker processes: a program that kills or hangs its process costs one verdict, not the sweep."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from .judge import CRASHED

Plan = tuple[tuple[str, bool, bool], ...]

ERRORS = "errors"
"""In the place of a dtype: the calls that eager refuses."""


@dataclass(frozen=True)
class Unit:
    """What a worker is given at a time: one operator in one dtype."""

    database: str
    index: int
    name: str
    dtype: str


@dataclass(frozen=True)
class Settings:
    """What is the same for all units."""

    codegen: str
    samples: int
    plan: Plan
    timeout: float = 120.0
    """Seconds without a verdict after which a worker is given up."""


@dataclass
class Finding:
    """One verdict."""

    program: str
    status: str
    detail: str = ""
    captured: bool = True


@dataclass
class UnitResult:
    unit: Unit
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


def run_units(units: Sequence[Unit], settings: Settings, workers: int) -> Iterator[UnitResult]:
    """Results in the order in which they come. Closing the generator stops the workers."""
    left = list(reversed(units))
    pool = [_Worker(settings) for _ in range(max(1, min(workers, len(units))))]
    try:
        for worker in pool:
            if left:
                worker.start(left.pop())
        while busy := [w for w in pool if w.result is not None]:
            wait([w.connection for w in busy], timeout=1.0)
            for worker in busy:
                result = worker.poll()
                if result is not None:
                    yield result
                    if left:
                        worker.start(left.pop())
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """One process and the unit it is at; the process is started anew when it died."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = tempfile.mkdtemp(prefix="triptych-sweep-")
        self.result: UnitResult | None = None
        self.program = ""
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.settings, self.cache), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, unit: Unit) -> None:
        self.result = UnitResult(unit)
        self.program = f"{unit.name} {unit.dtype}"
        self.started = self.heard = time.monotonic()
        self.connection.send(unit)

    def poll(self) -> UnitResult | None:
        """The result of the unit, if it is done."""
        result = self.result
        assert result is not None
        try:
            while self.connection.poll():
                kind, payload = self.connection.recv()
                self.heard = time.monotonic()
                if kind == "program":
                    self.program = payload
                elif kind == "finding":
                    result.findings.append(payload)
                else:
                    return self._done()
        except (EOFError, OSError):
            self.process.join()
            return self._lost(f"the process died with exit code {self.process.exitcode}")
        if time.monotonic() - self.heard > self.settings.timeout:
            self.process.kill()
            self.process.join()
            return self._lost(f"no verdict after {self.settings.timeout:.0f} s")
        return None

    def _lost(self, why: str) -> UnitResult:
        assert self.result is not None
        self.result.findings.append(Finding(self.program, CRASHED, why))
        self._spawn()
        return self._done()

    def _done(self) -> UnitResult:
        result, self.result = self.result, None
        assert result is not None
        result.seconds = time.monotonic() - self.started
        return result

    def stop(self) -> None:
        self.connection.close()  # one that waits for work ends by itself
        self.process.join(timeout=0 if self.result is not None else 5)
        self.process.kill()
        self.process.join()
        shutil.rmtree(self.cache, ignore_errors=True)


def _serve(connection: Connection, settings: Settings, cache: str) -> None:
    """The life of a worker process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    operators: dict[str, Any] = {}
    while True:
        try:
            unit = connection.recv()
        except (EOFError, OSError):
            return
        try:
            for finding in _findings(unit, settings, operators, connection):
                connection.send(("finding", finding))
            connection.send(("done", None))
        except BrokenPipeError:
            return


def _findings(unit: Unit, settings: Settings, operators: dict[str, Any], connection: Connection) -> Iterator[Finding]:
    from . import databases
    from .judge import SKIPPED, Verdict, judge
    from .programs import error_programs, programs

    if unit.database not in operators:
        operators[unit.database] = databases.operators((unit.database,))
    operator = operators[unit.database][unit.index]
    try:
        if unit.dtype == ERRORS:
            chosen = list(error_programs(operator))
        else:
            chosen = list(programs(operator, databases.DTYPES[unit.dtype], settings.samples, settings.plan))
    except Exception as error:
        yield Finding(f"{unit.name} {unit.dtype}", SKIPPED, f"no samples: {type(error).__name__}: {error}"[:300])
        return
    for program in chosen:
        connection.send(("program", program.name))
        try:
            verdict = judge(program, settings.codegen)
        except Exception as error:  # a sample that the sweep itself cannot copy or compare
            verdict = Verdict(SKIPPED, f"the sweep: {type(error).__name__}: {error}"[:300])
        yield Finding(program.name, verdict.status, verdict.detail, verdict.captured)
