"""Measures gains of passes, one after the other; `bench/gains.py` starts several such processes.

    python bench/one_gain.py NAME,NAME... [--device cpu] [--rounds 9] [--claims FOLDER] [--until SECONDS]

With a folder for claims, processes share the names: each takes the next that no other has taken. A report is one line
of JSON on standard output; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", type=lambda text: text.split(","), help="of passes and rules, with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--claims", type=Path, help="folder in which processes note what they have taken")
    parser.add_argument("--until", type=float, default=float("inf"), help="start nothing after this time.time()")
    parser.add_argument("--supervised", action="store_true", help="end when standard input is closed")
    given = parser.parse_args()
    left = claimed(given.names, given.claims, given.until)
    first = next(left, None)
    if first is None:
        print(json.dumps({"finished": True}))
        return
    # not before: a process that comes late ends without waiting for torch
    from gain_measure import measure_all
    from one_model import end_with_the_suite

    if given.supervised:
        end_with_the_suite()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measure_all(chain([first], left), given.device, given.rounds, lambda event: print(json.dumps(event), file=reports))


def claimed(names: Sequence[str], folder: Path | None, until: float) -> Iterator[str]:
    """The names that no other process has taken; each is taken when the iteration reaches it."""
    for name in names:
        if time.time() >= until:
            return
        if folder is not None:
            try:
                (folder / name).touch(exist_ok=False)
            except FileExistsError:
                continue
        yield name


if __name__ == "__main__":
    main()
