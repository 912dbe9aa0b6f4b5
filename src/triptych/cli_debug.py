"""The commands for when a result is wrong: `triptych bisect` and `triptych repro`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .cli_base import (
    JSON,
    OPTIONS,
    command,
    only_data_on_stdout,
    parse_options,
    python_files,
    require_writable,
    working,
)
from .errors import TriptychError

DIFFERS = 1
"""Exit code if the compiled program differs from eager."""


@command(
    "bisect",
    "Which rewrite makes a model wrong, or its compile fail.",
    "triptych bisect model.py:tower --train",
    "triptych bisect --check 'python my_test.py'",
)
@click.argument("file", metavar="FILE.py[:NAME]", required=False, shell_complete=python_files)
@click.option("--train", is_flag=True, help="Compare the training step: outputs and gradients.")
@OPTIONS
@click.option("--tolerance", type=click.FloatRange(min=0), help="Relative, in place of what rounding explains.")
@click.option("--check", "shell_command", metavar="COMMAND", help="Exit code 0: good. Takes the place of FILE.")
@click.option("--timeout", type=float, metavar="SECONDS", help="A COMMAND that runs longer is bad.")
@click.option("--out", default="repro.py", show_default=True, help="Where to write a small program that shows it.")
@click.option("--repro/--no-repro", "with_repro", default=True, help="Write that program, or only name the rewrite.")
@JSON
@click.pass_context
def bisect_command(
    context: click.Context,
    file: str | None,
    train: bool,
    options: tuple[str, ...],
    tolerance: float | None,
    shell_command: str | None,
    timeout: float | None,
    out: str,
    with_repro: bool,
    as_json: bool,
) -> None:
    """Find the pass, the rule and the single rewrite that make a model of yours wrong, or its compile fail.

    The model is compared with eager, outputs, writes and gradients; or COMMAND says by its exit code whether all is
    well. It is run with TRIPTYCH_REWRITE_LIMIT set, which bounds the rewrites of that process.

    The exit code is 1 if something differs, 0 if not.
    """
    from .explaining.bisect import EQUAL, bisect, bisect_command

    if file is None and shell_command is None:
        raise TriptychError("give FILE.py[:NAME], or a command with --check")
    if file is not None and shell_command is not None:
        raise TriptychError("give FILE.py[:NAME] or a command with --check, not both")
    given = parse_options(options)
    if with_repro and file is not None:
        require_writable(out)
    with only_data_on_stdout(as_json), working("compiling") as tell:
        if shell_command is not None:
            bisection = bisect_command(shell_command, tell, timeout)
        else:
            assert file is not None
            subject, settings = _load(file, given)
            bisection = bisect(
                subject.model, *subject.args, train=train or settings.pop("train", False), tolerance=tolerance,
                repro=out if with_repro else None, tell=tell, **settings, **subject.kwargs,
            )  # fmt: skip
    click.echo(json.dumps(bisection.to_dict(), indent=2) if as_json else str(bisection))
    context.exit(0 if bisection.verdict == EQUAL else DIFFERS)


@command("repro", "The smallest program that shows a fault.", "triptych repro model.py:tower --out repro.py")
@click.argument("file", metavar="FILE.py[:NAME]", shell_complete=python_files)
@click.option("--train", is_flag=True, help="Compare the training step: outputs and gradients.")
@OPTIONS
@click.option("--reduce/--whole", "reduce", default=True, help="Make the program smaller, or write it whole.")
@click.option("--out", default="repro.py", show_default=True, help="The file to write.")
@JSON
@click.pass_context
def repro_command(
    context: click.Context, file: str, train: bool, options: tuple[str, ...], reduce: bool, out: str, as_json: bool
) -> None:
    """Write a model of yours that is compiled wrongly as a small program that anybody can run.

    Run, it says whether the compiled program still differs from eager: exit code 1, or 0.
    """
    from .explaining.reduce import write_smallest
    from .explaining.replay import Subject, options_for_checks

    given = parse_options(options)
    require_writable(out)
    with only_data_on_stdout(as_json), working("compiling") as tell:
        subject, settings = _load(file, given)
        train = train or settings.pop("train", False)
        checked = Subject(subject.model, subject.args, subject.kwargs, train=train, dynamic=settings.get("dynamic"))
        written = write_smallest(checked, options_for_checks(settings["options"]), Path(out), reduce, tell)
    click.echo(json.dumps(written.to_dict(), indent=2) if as_json else str(written))
    context.exit(DIFFERS if written.failure is not None else 0)


def _load(file: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model of a file; a written reproduction brings its settings with it."""
    from .explaining.source import load

    subject = load(file)
    return subject, {**subject.settings, "options": {**subject.settings.get("options", {}), **options}}
