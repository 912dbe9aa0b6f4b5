"""The command `triptych record`: runs a user's script as it is, and writes a report of all its compiles."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

import click

from .cli_base import Failed, command, only_data_on_stdout, require_writable
from .errors import TriptychError

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


@command(
    "record",
    "Run a script of yours, and report all its compiles.",
    "triptych record --html run.html train.py --steps 10",
)
@click.option("--html", default="record.html", show_default=True, metavar="PATH", help="The report page to write.")
@click.option("--json", "as_json", is_flag=True, help="Print data (docs/json.md) instead of a table.")
@click.argument("script", metavar="SCRIPT.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def record_command(
    context: click.Context, html: str, as_json: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run SCRIPT.py with its ARGUMENTS, as python does, and write a report of everything that it compiles.

    That is every program with its passes, recompiles with the guard that failed, graph breaks with their line.

    The exit code is that of the script. For a program that is not started as a script, set the environment variable
    TRIPTYCH_REPORT to a directory.
    """
    from .explaining.record import record

    path = Path(script)
    if not path.is_file():
        raise TriptychError(f"no file {script}")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    failed = False
    code = 0
    require_writable(html)
    with record() as recording, only_data_on_stdout(as_json):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
            if isinstance(left.code, str):
                click.echo(left.code, err=True)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            failed = True
            print_traceback(error, script)
    recording.to_html(html)
    click.echo(recording.to_json() if as_json else f"{recording}\nreport: {html}")
    if failed:
        raise Failed(f"{script} failed; the report is of what it compiled until then")
    context.exit(code)


def print_traceback(error: Exception, script: str) -> None:
    """Print it as python does: from the script on, without the frames that ran the script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    # a script that could not be compiled has no frame of its own
    traceback.print_exception(type(error), error, frames)


# arguments after the script are for the script
record_command.context_settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
