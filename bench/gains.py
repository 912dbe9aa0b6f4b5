"""The gain of each pass and rule: a program with the pass on and with it off, the rest of the pipeline the same.

    python bench/gains.py                                # all, on the GPU if there is one
    python bench/gains.py fuse_attention pad_mm --device cpu
    python bench/gains.py --stop-after 240 --workers 12  # the most telling first
    python bench/gains.py --resume                       # go on where an interrupted run ended

Both variants are compiled by the default code generator and run in one process, in turns; the time is the median of the
rounds, and the gain is the time without the pass over the time with it. Programs are workloads of `gain_workloads.py`,
or declared examples of the pass made larger as `gain_subjects.py` says; each figure names its program. Beside the
times: kernels launched (on a CPU: calls of kernels in the generated code), bytes read and written as estimated from the
graph, and how far the results differ. Where another pass or the code generator does the same, the gain is 1.

Processes compile together, and one that measures has the machine to itself. OUTPUT/gains-DEVICE.json is written after
each pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gain_subjects import names as all_names
from processes import Case, Record, Settings, run_all
from rich.console import Console
from suite import at_least, environment, one_of, terminated_like_interrupted

SAME_RUN = ("machine", "versions", "rounds")
"""What must be equal for figures to be written to one file."""
STARTS = 3
"""How many processes are started for each worker: one that ends early is replaced."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(all_names()))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here that torch can use; --device cpu runs smaller sizes")
    path = Path(given.output) / f"gains-{given.device}.json"
    file = GainsFile(path, describe(given, sys.argv[1:] if arguments is None else arguments))
    if given.resume and (differing := file.resume()):
        parser.error(f"{path} has other {' and '.join(differing)}: give another --output, or leave out --resume")
    wanted = [name for name in given.names or all_names() if name not in file.gains]
    console = Console(highlight=False)
    with terminated_like_interrupted(), tempfile.TemporaryDirectory(prefix="triptych-gains-") as claims:
        command = measuring(wanted, given, claims)
        settings = Settings(command, given.workers, math.inf, path.parent / "logs", given.stop_after)
        settings.on_change = lambda running: file.add([child.record for child in running], console)
        try:
            for record in run_all([("gains", str(i)) for i in range(STARTS * given.workers)], settings):
                file.add([record], console, ended=True)
        except KeyboardInterrupt:
            console.print(f"interrupted; {len(file.gains)} are in {path}, --resume goes on from there")
            return 130
    if missing := [name for name in wanted if name not in file.gains]:
        console.print(f"{len(missing)} of {len(wanted)} were not started; --resume goes on from here")
    console.print(str(path), soft_wrap=True)
    with contextlib.suppress(OSError):
        settings.logs.rmdir()  # stays if it contains the log of a failure
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    known = one_of("pass or rule", all_names())
    parser.add_argument("names", nargs="*", type=known, metavar="NAME", help="passes or rules; by default all")
    parser.add_argument("--list", action="store_true", help="show the names, in the order of measuring, and end")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--rounds", type=at_least(1, int), default=9, help="turns of each way (default 9)")
    parser.add_argument(
        "--stop-after", type=at_least(0, float), default=math.inf, metavar="SECONDS",
        help="start with no further pass after that time; those that were started are measured",
    )  # fmt: skip
    parser.add_argument("--output", default=str(Path(__file__).with_name("results")), metavar="FOLDER")
    parser.add_argument(
        "--workers", type=at_least(1, int), default=max(1, min(8, (os.cpu_count() or 1) // 2)) if cuda else 1,
        help="processes that may compile at a time (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="skip what OUTPUT has, also what has no figures")
    return parser


def describe(given: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What a reader must know to reproduce the figures; where they were written is not part of it."""
    told = [a for i, a in enumerate(arguments) if a != "--output" and arguments[max(i - 1, 0)] != "--output"]
    return {
        **environment(given.device),
        "rounds": given.rounds,
        "command": shlex.join(["python", "bench/gains.py", *told]),
        "ratio": "time without the pass over time with it; above 1 the pass makes the program faster",
        "bytes": "read and written by all kernels, estimated from the graph",
    }


def measuring(names: Sequence[str], given: argparse.Namespace, claims: str) -> Any:
    """The command of one process, which takes names until none is left."""
    until = time.time() + given.stop_after

    def command(case: Case, scratch: str) -> list[str]:
        return [
            sys.executable, str(Path(__file__).with_name("one_gain.py")), ",".join(names), "--device", given.device,
            "--rounds", str(given.rounds), "--claims", claims, "--until", str(until), "--supervised",
        ]  # fmt: skip

    return command


class GainsFile:
    """The figures so far, in memory and on disk."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.gains: dict[str, dict[str, Any]] = {}

    def resume(self) -> list[str]:
        """Take over the figures of an earlier run, unless it differs from this one; returns in what it differs."""
        if not self.path.exists():
            return []
        before = json.loads(self.path.read_text())
        if differing := [name for name in SAME_RUN if before.get(name) != self.header[name]]:
            return differing
        self.gains = before["gains"]
        return []

    def add(self, records: Sequence[Record], console: Console, ended: bool = False) -> None:
        """Add what is new in the records of processes; with `ended`, what was started and not finished has failed."""
        new = {}
        for record in records:
            for name, reported in record["variants"].items():
                figures = {key: value for key, value in reported.items() if key != "started"}
                if not figures and ended:
                    figures = {"failure": record.get("reason") or record.get("status", "")}
                if figures and name not in self.gains:
                    new[name] = figures
        if not new:
            return
        self.gains |= new
        self.save()
        for name, figures in new.items():
            console.print(row(name, figures), markup=False, soft_wrap=True)

    def save(self) -> None:
        """Write the file as a whole: an interruption leaves the previous file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(self.path.name + ".part")
        aside.write_text(json.dumps({**self.header, "gains": self.gains}, indent=1) + "\n")
        os.replace(aside, self.path)


def row(name: str, figures: dict[str, Any]) -> str:
    """One pass in one line."""
    if "ratio" not in figures:
        outcome = f"failed: {figures['failure']}" if "failure" in figures else figures["skipped"]
        return f"{name:40} {outcome}"
    on, off, ms = figures["on"], figures["off"], figures["ms"]
    kernels = f"{off['kernels']} -> {on['kernels']} kernels"
    return f"{name:40} {figures['ratio']:5.2f}x  {ms['off']:.3f} -> {ms['on']:.3f} ms  {kernels}  {figures['workload']}"


if __name__ == "__main__":
    sys.exit(main())
