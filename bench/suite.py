"""The benchmark: models as users have them, by eager, Inductor and Triptych, in inference and training.

    python bench/suite.py                          # every model, on the GPU if there is one
    python bench/suite.py bert gpt2 --mode training
    python bench/suite.py --device cpu --variants eager,inductor,triptych --rounds 5
    python bench/suite.py --resume                 # go on where an interrupted run ended

Each model and mode runs in a process of its own: a crash or a time-out costs one row. All variants of a row run in
that process, in turns; the time is the median of the rounds. Processes compile together, then each measures with the
machine to itself. On a GPU the models have real sizes in bfloat16, on a CPU small ones in float32. Weights are random,
dropout is off. Each compiler starts with empty caches, and its variants share their kernels; with several workers,
compile times are those of a busy machine. Errors are against float32, on a CPU float64.

The tables are saved after each row: OUTPUT/suite-DEVICE.md to read, OUTPUT/suite-DEVICE.json with all figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from models import INFERENCE, MODELS, TRAINING
from processes import WAITING, Case, Child, Record, Settings, measuring, run_all
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tables import load, save, speed, summary
from variants import INDUCTOR, VARIANTS

from triptych.errors import UnknownName

MODES = {"inference": [INFERENCE], "training": [TRAINING], "both": [INFERENCE, TRAINING]}
SAME_RUN = ("machine", "versions", "rounds")
"""What must be equal for rows to be in one table."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.list:
        show_names()
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here that torch can use; --device cpu runs small sizes")
    path = Path(given.output) / f"suite-{given.device}"
    header = describe(given)
    before, records = load(path) if given.resume else ({}, [])
    if differing := [name for name in SAME_RUN if before and before.get(name) != header[name]]:
        other = " and ".join(differing)
        parser.error(f"{path}.json has other {other}: give another --output, or leave out --resume")
    done = {(record["model"], record["mode"]) for record in records}
    models = given.models or list(MODELS)
    cases = [case for model in models for mode in MODES[given.mode] if (case := (model, mode)) not in done]

    def variants(mode: str) -> list[str]:
        return [name for name in given.variants if VARIANTS[name].applies(given.device, mode)]

    console = Console(highlight=False)
    with terminated_like_interrupted(), progress(console, len(cases)) as (on_change, on_row):
        settings = Settings(
            measuring(given.device, variants, given.rounds), given.workers, given.time_limit,
            path.parent / "logs", given.stop_after, on_change,
        )  # fmt: skip
        try:
            for record in run_all(cases, settings):
                records.append(record)
                save(path, header, records)
                on_row(record)
        except KeyboardInterrupt:
            console.print(f"interrupted; {len(records)} rows are in {path}.md, --resume goes on from there")
            return 130
    save(path, header, records)
    if missing := len(cases) - (len(records) - len(done)):
        console.print(f"{missing} of {len(cases)} were not started; --resume goes on from here")
    console.print(summary(records), markup=False, soft_wrap=True)
    console.print(f"{path}.md", soft_wrap=True)
    with contextlib.suppress(OSError):
        settings.logs.rmdir()  # stays if it contains the log of a failure
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores, cuda = os.cpu_count() or 1, torch.cuda.is_available()
    parser.add_argument("models", nargs="*", type=one_of("model", MODELS), metavar="MODEL", help="by default all")
    parser.add_argument("--list", action="store_true", help="show the models and variants, and end")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--mode", choices=tuple(MODES), default="both")
    parser.add_argument(
        "--variants", type=names_of_variants, default=list(VARIANTS), metavar="NAME,...",
        help="by default all that the device and the mode allow: " + ", ".join(VARIANTS),
    )  # fmt: skip
    parser.add_argument("--rounds", type=at_least(1, int), default=15, help="turns of each variant (default 15)")
    parser.add_argument(
        "--time-limit", type=at_least(0, float), default=900.0, metavar="SECONDS",
        help="for one model and mode, waiting for its turn not counted (default 900)",
    )  # fmt: skip
    parser.add_argument(
        "--stop-after", type=at_least(0, float), default=math.inf, metavar="SECONDS",
        help="start no further model after that time; those that run are measured, --resume continues",
    )  # fmt: skip
    parser.add_argument("--output", default=str(Path(__file__).with_name("results")), metavar="FOLDER")
    parser.add_argument(
        "--workers", type=at_least(1, int), default=max(1, min(8, cores // 2)) if cuda else 1,
        help="processes that may compile at a time (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="skip what has a row in OUTPUT, also one without figures")
    return parser


def one_of(kind: str, known: Any) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(str(UnknownName(kind, name, known)))
        return name

    return check


def names_of_variants(text: str) -> list[str]:
    given = set(map(one_of("variant", VARIANTS), filter(None, map(str.strip, text.split(",")))))
    return [name for name in VARIANTS if name in given]


def at_least(least: float, number: type) -> Callable[[str], Any]:
    def check(text: str) -> Any:
        try:
            value = number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"at least {least}, not {value}")
        return value

    return check


def show_names() -> None:
    width = max(map(len, MODELS))
    for name, builder in MODELS.items():
        print(f"{name:{width}}  {builder.__doc__}")
    print("\nvariants:")
    for name, variant in VARIANTS.items():
        limits = ["inference"] * variant.inference_only + ["GPU"] * variant.graphs
        print(f"{name:{width}}  {variant.summary}" + (f" ({', '.join(limits)} only)" if limits else ""))


def describe(given: argparse.Namespace) -> dict[str, Any]:
    """What a reader of the table must know to reproduce it."""
    return {
        **environment(given.device),
        "sizes": "real, bfloat16" if given.device == "cuda" else "small, float32",
        "rounds": given.rounds,
        "workers": given.workers,
        "command": shlex.join(["python", "bench/suite.py", *sys.argv[1:]]),
    }


def environment(device: str) -> dict[str, str]:
    """The machine, and the versions of what runs on it."""
    cpu = f"{processor()}, {os.cpu_count()} cores"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("triton", "transformers", "torchvision", "timm", "triptych"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return {
        "machine": f"{torch.cuda.get_device_name()}; {cpu}" if device == "cuda" else cpu,
        "versions": ", ".join(versions),
    }


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM, as sent by `timeout`, end a run as Ctrl-C does: with the rows so far, and no process left."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def progress(
    console: Console, total: int
) -> Iterator[tuple[Callable[[Sequence[Child]], None], Callable[[Record], None]]]:
    """Print one line per row; on a terminal also a progress bar, with what each process does."""
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def on_change(running: Sequence[Child]) -> None:
            states = [f"{name(child.case)} {child.state}" for child in running if child.state != WAITING]
            waiting = len(running) - len(states)
            bar.update(task, description="; ".join(states + [f"{waiting} waiting"] * bool(waiting)))

        def on_row(record: Record) -> None:
            console.print(row(record), markup=False, soft_wrap=True)
            bar.advance(task)

        yield on_change, on_row


def name(case: Case) -> str:
    return " ".join(case)


def row(record: Record) -> str:
    """One case in one line."""
    parts = [f"{record['model']:24} {record['mode']:9}"]
    if record["reason"]:
        parts.append(f"{record['status']}: {record['reason']}")
    for variant, figures in record["variants"].items():
        ratio = speed(record, variant)
        if "failure" in figures:
            parts.append(f"{variant} failed: {figures['failure']}")
        elif variant == INDUCTOR or ratio is None:
            parts.append(f"{variant} {figures['ms']:.3f} ms" if "ms" in figures else f"{variant} not timed")
        else:
            parts.append(f"{variant} {ratio:.2f}x")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
