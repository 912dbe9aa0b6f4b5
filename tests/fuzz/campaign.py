"""Many seeds, in one process or several: what is found is shrunk and written as a test, at once."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from .judge import Verdict, judge
from .program import Program
from .shrink import shrink
from .writer import write_program

PROGRAMS_PER_PROCESS = 1500
"""Then a fresh process goes on: the caches of a compiler grow."""


@dataclass
class Progress:
    """Counts over all processes."""

    started: float = field(default_factory=time.monotonic)
    kinds: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    faults: dict[frozenset[str], list[int]] = field(default_factory=dict)
    """The seeds that show each fault."""

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        count = self.kinds.total()
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.most_common())
        return f"{count} programs in {seconds:.0f} s ({count / max(seconds, 1e-9):.1f}/s): {kinds}; {len(self.fired)} rules fired"


def try_seed(seed: int, codegen: str, route: str | None = None) -> tuple[Program, Verdict]:
    """`codegen` may be "both": then one program in eight goes through kernels."""
    chosen = ("inductor" if seed % 8 == 0 else "eager") if codegen == "both" else codegen
    program = write_program(seed, chosen, route)
    return program, judge(program)


def work(number: int, stride: int, first: int, until: float, how: tuple[str, str | None], folder: str, results: Any) -> None:
    """One process: its seeds, until the time is up. Says what it is about to try: that may be the end of it."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    for i in range(PROGRAMS_PER_PROCESS):
        seed = first + i * stride
        if time.time() > until:
            break
        results.put((number, seed, None))
        try:
            program, verdict = try_seed(seed, *how)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            results.put((number, seed, ("fuzzer failed", (problem,), frozenset({problem[:80]}), Counter())))
            continue
        results.put((number, seed, (verdict.kind, verdict.lines, verdict.signature, verdict.fired)))
        if verdict.is_fault:
            small, said = shrink(program, verdict)
            write_test(Path(folder), small, said)
    results.put((number, first + PROGRAMS_PER_PROCESS * stride, "next"))


def campaign(
    first: int, seconds: float, workers: int, folder: Path, codegen: str = "eager", route: str | None = None
) -> Progress:
    """Try seeds from `first` on; a process that dies is replaced, and its seed is reported."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    progress, until = Progress(), time.time() + seconds
    current: dict[int, int] = {}
    processes: dict[int, Any] = {}

    def start(number: int, seed: int) -> None:
        arguments = (number, workers, seed, until, (codegen, route), str(folder), results)
        processes[number] = context.Process(target=work, args=arguments)
        processes[number].start()

    for number in range(workers):
        start(number, first + number)
    shown = 0.0
    with (folder / "log.txt").open("a") as log:
        while processes:
            try:
                number, seed, result = results.get(timeout=1)
            except Empty:
                for number, process in list(processes.items()):
                    if not process.is_alive() and results.empty():
                        del processes[number]
                        if process.exitcode:
                            _report(log, progress, current.get(number, -1), "died", (f"exit code {process.exitcode}",))
                            if time.time() < until:
                                start(number, current.get(number, first) + workers)
                continue
            if result is None:
                current[number] = seed
            elif result == "next":
                processes.pop(number).join()
                if time.time() < until:
                    start(number, seed)
            else:
                kind, lines, signature, fired = result
                progress.fired.update(fired)
                progress.kinds[kind] += 1
                if kind not in ("equal", "invalid", "unstable"):
                    progress.faults.setdefault(signature, []).append(seed)
                    _report(log, progress, seed, kind, lines, count=False)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(progress, flush=True)
    print(progress)
    return progress


def _report(log: Any, progress: Progress, seed: int, kind: str, lines: tuple[str, ...], count: bool = True) -> None:
    if count:
        progress.kinds[kind] += 1
    text = f"seed {seed}: {kind}: {'; '.join(lines[:2])}"
    print(text, file=log, flush=True)
    print(text[:300], flush=True)


def write_test(folder: Path, program: Program, verdict: Verdict) -> Path:
    """The program as a test file that can be moved into `tests`."""

    def listed(lines: tuple[str, ...]) -> str:
        return "(\n" + "".join(f"        {line!r},\n" for line in lines) + "    )"

    text = f'''"""{verdict.kind}: {"; ".join(verdict.lines[:2])}"""

from tests.fuzz.judge import check
from tests.fuzz.program import Program

PROGRAM = Program(
    seed={program.seed},
    setup={listed(program.setup)},
    body={listed(program.body)},
    returned={program.returned!r},
    train={program.train},
    dynamic={program.dynamic},
    route={program.route!r},
    codegen={program.codegen!r},
)


def test_seed_{program.seed}():
    check(PROGRAM)


if __name__ == "__main__":
    print(PROGRAM)
    test_seed_{program.seed}()
'''
    path = folder / f"test_seed_{program.seed}.py"
    path.write_text(text)
    return path
