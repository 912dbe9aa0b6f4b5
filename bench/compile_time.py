"""How long a compile takes: cold, warm, and in a second process, by Inductor and by Triptych.

    python bench/compile_time.py                              # transformers of 6, 12, 24 and 48 layers
    python bench/compile_time.py bert --mode training --repeat 5
    python bench/compile_time.py --depths 6 --device cuda --markdown

cold            the first call, with empty caches, in a process that has compiled a tiny program before
warm            the same after `torch._dynamo.reset()`: graphs are in the caches
second process  from the start of a process to its first result, with the caches of the first on disk
after import    the part of that after `import torch` and after the model is built

Each compiler has processes and caches of its own, and they alternate. Figures are medians in seconds: of the clock, and
of the processor with the processes that a compile starts and waits for, which other load on the machine hardly changes.
Kernels compile in one process (TORCHINDUCTOR_COMPILE_THREADS=1) unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from one_compile import GPT, STARTED

COMPILERS = ("inductor", "triptych")
KINDS = ("cold", "warm", "second process", "after import")
CLOCKS = {"wall": "clock", "cpu": "processor"}
MODES = {"inference": ["inference"], "training": ["training"], "both": ["inference", "training"]}
Figures = dict[str, Any]
"""By kind: seconds by clock."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    subjects = given.models or [f"{GPT}{depth}" for depth in given.depths.split(",")]
    cases = [(name, mode) for name in subjects for mode in MODES[given.mode]]
    rows = []
    for number, (name, mode) in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {name}, {mode}", file=sys.stderr)
        figures = measure(name, mode, given.device, given.repeat)
        rows += list(table_rows(name, mode, figures))
    write = markdown if given.markdown else plain
    print(write(("program", "mode", "what", "clock", "Inductor", "Triptych", "ratio"), rows))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="models of the suite by name, or gpt-DEPTH; else --depths")
    parser.add_argument("--depths", default="6,12,24,48", help="layers of small transformers")
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeat", type=int, default=3, help="how often each process is started")
    parser.add_argument("--markdown", action="store_true", help="print a table for a document")
    return parser.parse_args(arguments)


def measure(name: str, mode: str, device: str, repeat: int) -> dict[str, list[Figures]]:
    """The figures of every repetition by compiler. Every other round, they take turns in the other order."""
    figures: dict[str, list[Figures]] = {compiler: [] for compiler in COMPILERS}
    for number in range(repeat):
        for compiler in reversed(COMPILERS) if number % 2 else COMPILERS:
            print(f"  round {number + 1} of {repeat}: {compiler}", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix="triptych-bench-") as caches:
                run = [
                    child([name, mode, "--compiler", compiler, "--device", device, "--kind", kind], caches)
                    for kind in ("cold", "second")
                ]
            if not run[1].pop("from cache"):
                print(f"  {compiler}: the second process has compiled something anew", file=sys.stderr)
            figures[compiler].append({**run[0], **run[1]})
    return figures


def child(arguments: Sequence[str], caches: str) -> Figures:
    """Start a process that finds compiled programs only in this folder; what it reports."""
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # sources would be compiled again in every process
    environment |= {
        "TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": str(Path(caches, "triton")),
        "TRIPTYCH_ON_ERROR": "raise", "HF_HUB_OFFLINE": "1", STARTED: str(time.time()),
    }  # fmt: skip
    script = str(Path(__file__).with_name("one_compile.py"))
    done = subprocess.run([sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def table_rows(name: str, mode: str, figures: dict[str, list[Figures]]) -> Iterator[tuple[str, ...]]:
    for kind in KINDS:
        for clock, title in CLOCKS.items():
            medians = [statistics.median(one[kind][clock] for one in figures[compiler]) for compiler in COMPILERS]
            theirs, ours = medians
            yield name, mode, kind, title, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * 4 + ["---:"] * (len(titles) - 4), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    texts = [[cell.ljust(width) for cell, width in zip(line, widths)] for line in (titles, *rows)]
    return "\n".join("  ".join(cells).rstrip() for cells in texts)


if __name__ == "__main__":
    sys.exit(main())
