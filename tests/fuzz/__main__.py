"""`python -m tests.fuzz`: a campaign, or one seed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .campaign import campaign, try_seed, write_test
from .routes import ROUTES
from .shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="judge this one program")
    parser.add_argument("--first", type=int, default=0, help="the first seed of a campaign")
    parser.add_argument("--time", type=float, default=60, help="seconds")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--codegen", choices=("eager", "inductor", "both"), default="eager")
    parser.add_argument("--route", choices=ROUTES, help="see routes.py; by default a mixture")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="where tests are written")
    given = parser.parse_args()
    if given.seed is None:
        progress = campaign(given.first, given.time, given.workers, given.found, given.codegen, given.route)
        for signature, seeds in progress.faults.items():
            print(f"{len(seeds):4} x {'; '.join(sorted(signature))}: seeds {seeds[:5]}")
        return bool(progress.faults)
    program, verdict = try_seed(given.seed, given.codegen, given.route)
    print(program)
    print(verdict.kind, *verdict.lines, sep="\n  ")
    if verdict.is_fault:
        small, said = shrink(program, verdict)
        given.found.mkdir(parents=True, exist_ok=True)
        print("\nshrunk:\n", small, said.kind, *said.lines, sep="\n")
        print("written to", write_test(given.found, small, said))
    return verdict.is_fault


if __name__ == "__main__":
    sys.exit(main())
