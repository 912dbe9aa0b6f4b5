"""The command line of the operator sweep: `python -m tests.sweep`."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .databases import DATABASES, DTYPES, operators
from .judge import CRASHED, WRONG
from .programs import ALONE, BETWEEN, IN_PLACE
from .report import ResultFile, Summary
from .workers import ERRORS, Plan, Settings, Unit, run_units

PLAN: Plan = (
    # form, gradient, dynamic sizes
    (ALONE, True, False),
    (BETWEEN, True, True),
    (IN_PLACE, True, False),
    (BETWEEN, False, False),
    (ALONE, False, True),
    (IN_PLACE, False, False),
)
THOROUGH: Plan = tuple(
    (form, gradient, dynamic)
    for form in (ALONE, BETWEEN, IN_PLACE)
    for gradient in (True, False)
    for dynamic in (False, True)
)


@click.command()
@click.option("--db", "databases", multiple=True, type=click.Choice(DATABASES), help="Which databases; all of them if none is named.")
@click.option("--op", "pattern", default="", help="Operators whose name this regular expression matches from its beginning.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice([*DTYPES, ERRORS]), help="Which dtypes; 'errors' is the calls that eager refuses. All of them if none is named.")
@click.option("--codegen", type=click.Choice(["eager", "inductor"]), default="eager", show_default=True)
@click.option("--form", "forms", multiple=True, type=click.Choice([ALONE, BETWEEN, IN_PLACE]), help="Which programs; all of them if none is named.")
@click.option("--dynamic/--static", default=None, help="Only dynamic or only static sizes; both if not given.")
@click.option("--gradient/--forward", default=None, help="Only with or only without gradients; both if not given.")
@click.option("--thorough", is_flag=True, help="Every form with and without gradients and with both kinds of sizes.")
@click.option("--samples", type=click.IntRange(1), default=3, show_default=True, help="Samples of each operator and dtype.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Worker processes.")
@click.option("--shard", default="0/1", show_default=True, help="i/n: only every n-th operator and dtype, from the i-th on.")
@click.option("--limit", type=float, default=None, help="Stop after this many seconds.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds that one program may take.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/sweep.jsonl"), show_default=True, help="The result file.")
def main(
    databases: tuple[str, ...], pattern: str, dtypes: tuple[str, ...], codegen: str, forms: tuple[str, ...],
    dynamic: bool | None, gradient: bool | None, thorough: bool, samples: int, workers: int, shard: str,
    limit: float | None, timeout: float, output: Path,
) -> None:  # fmt: skip
    """Compile every operator of torch's own test databases and compare it with eager.

    An operator is "refused by torch itself" where torch's own compiler (aot_eager, or Inductor with --codegen
    inductor) fails on the same program or gives another result than eager, too. The exit code is 1 if anything is
    wrong or crashed.
    """
    plan = tuple(
        step
        for step in (THOROUGH if thorough else PLAN)
        if (not forms or step[0] in forms) and gradient in (None, step[1]) and dynamic in (None, step[2])
    )
    settings = Settings(codegen, samples, plan, timeout)
    units = chosen_units(databases or DATABASES, pattern, dtypes or (*DTYPES, ERRORS), shard)
    summary = sweep(units, settings, workers, limit, output)
    for line in summary.lines():
        print(line)
    print(f"results: {output}")
    sys.exit(1 if summary.failed else 0)


def chosen_units(databases: tuple[str, ...], pattern: str, dtypes: tuple[str, ...], shard: str = "0/1") -> list[Unit]:
    part, parts = map(int, shard.split("/"))
    units = []
    for database in databases:
        for index, operator in enumerate(operators((database,))):
            if not re.match(pattern, operator.name):
                continue
            supported = [d for d in dtypes if d in DTYPES and DTYPES[d] in operator.dtypes]
            if ERRORS in dtypes and getattr(operator.entry, "error_inputs_func", None) is not None:
                supported.append(ERRORS)
            units += [Unit(database, index, operator.name, dtype) for dtype in supported]
    return units[part::parts]


def sweep(units: list[Unit], settings: Settings, workers: int, limit: float | None, output: Path) -> Summary:
    """Run the units, show how far it is, and write down every result as it comes."""
    summary, results = Summary(), ResultFile(output)
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    stream = run_units(units, settings, workers)
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("sweep", total=len(units))
            for result in stream:
                summary.add(result)
                results.add(result)
                for finding in result.findings:
                    if finding.status in (WRONG, CRASHED):
                        progress.console.print(f"{finding.status}: {finding.program}: {finding.detail}", markup=False)
                counts = summary.programs
                progress.update(
                    task, advance=1, description=f"{result.unit.name}: {counts[WRONG]} wrong, {counts[CRASHED]} crashed"
                )
                if limit is not None and time.monotonic() - started > limit:
                    progress.console.print(f"stopped after {limit:.0f} s, with {progress.tasks[0].completed} of {len(units)} done")
                    break
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        stream.close()
        results.close(summary)
    return summary


if __name__ == "__main__":
    main()
