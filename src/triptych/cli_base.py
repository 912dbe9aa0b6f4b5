"""What all commands share: the group, a command with examples and short errors, options, a spinner.

Importing the commands must not import the compiler: `--help` and completion would wait for it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import __version__
from .errors import TriptychError, UnknownName, in_one_line

EXIT_CODES = """\
Exit codes:
  0  all is well
  1  something differs from eager, is missing, or failed
  2  the call, or the file it names, has to change"""

COMPLETION = """\
Completion of names in your shell (bash; also zsh_source, fish_source):
  eval "$(_TRIPTYCH_COMPLETE=bash_source triptych)\""""


class Failed(click.ClickException):
    """An error as one line."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"triptych: {self.message}", err=True)


class WrongUse(Failed):
    """Something in the call or in the user's file has to change."""

    exit_code = 2


class Group(click.Group):
    """The error for an unknown command names the near ones."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise WrongUse(str(UnknownName("command", args[0], self.commands)))
        return super().resolve_command(ctx, args)


def command(name: str, short: str, *examples: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command with an example in its help, and errors without a traceback unless one is asked for."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, with_traceback: bool, **kwargs: Any) -> None:
            try:
                with contextlib.nullcontext() if with_traceback else _quiet_torch():
                    function(*args, **kwargs)
            except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
                raise
            except Exception as error:
                if with_traceback:
                    traceback.print_exception(error)
                raise _failure(error, with_traceback) from error

        option = click.Option(["--traceback", "with_traceback"], is_flag=True, help="Show where an error came from.")
        # click reverses them: the last in the help text
        run.__click_params__ = [option, *getattr(function, "__click_params__", [])]  # type: ignore[attr-defined]
        shown = "\n  ".join(examples)
        epilog = f"\b\nExample{'s' if len(examples) > 1 else ''}:\n  {shown}"
        return main.command(name, short_help=short, epilog=epilog)(run)

    return decorate


def _failure(error: Exception, with_traceback: bool) -> Failed:
    """The error as one line, with where in the user's file it was raised."""
    if isinstance(error, TriptychError):
        return WrongUse(str(error))
    where = _line_of_users_file(error)
    hint = "" if with_traceback else " (--traceback shows more)"
    return Failed((f"{where} raised " if where else "") + in_one_line(error) + hint)


def _line_of_users_file(error: BaseException) -> str:
    """`model.py:31`: the last line of the named file that was running, or that Dynamo says it was tracing."""
    path = getattr(sys.modules.get("triptych_subject"), "__file__", None)
    if path is None:
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    traced = re.findall(rf'File "{re.escape(path)}", line (\d+)', str(error))
    return f"{Path(path).name}:{(traced or lines)[-1]}" if traced or lines else ""


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Torch logs a traceback of each error that it then raises: unless logs were asked for, the error is enough."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"\b\nExample:\n  triptych demo\n\n\b\n{EXIT_CODES}\n\n\b\n{COMPLETION}",
)
@click.version_option(__version__, prog_name="triptych")
def main() -> None:
    """See what a graph-optimising compiler does to a PyTorch model, pass by pass."""


# ---- arguments ----


def parse_option(text: str) -> tuple[str, Any]:
    """`verify=each`, `fallback_random=true`, `pass_name.limit=3`."""
    name, sign, value = text.partition("=")
    if not sign:
        raise TriptychError(f"--option takes NAME=VALUE, not {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Options of the compiler, whose names and values are checked before a file is read or anything is compiled."""
    from .pipeline import Options

    options = dict(map(parse_option, texts))
    Options.make(options)
    return options


def require_writable(path: str | None) -> None:
    """Raise an error now, not after a long compile, if a file cannot be written. Missing folders are created."""
    if path is None:
        return
    folder = Path(path).parent
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(0, "it is a folder")
        folder.mkdir(parents=True, exist_ok=True)
        if Path(path).exists():
            with open(path, "ab"):
                pass
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise WrongUse(f"{path} cannot be written: {error.strerror or error}") from error


# ---- completion in the shell ----


def complete(names: Callable[[], list[str]]) -> Callable[..., list[CompletionItem]]:
    """Complete an argument from a list of names that is computed only when it is needed."""

    def completions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(incomplete)]

    return completions


def python_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def pass_names() -> list[str]:
    from .pipeline import pass_names

    return sorted(pass_names())


def rule_and_pass_names() -> list[str]:
    from .pipeline import pass_names, rule_names

    return sorted({*pass_names(), *rule_names()})


def stage_names() -> list[str]:
    from .pipeline import STAGES

    return list(STAGES)


def option_names() -> list[str]:
    from dataclasses import fields

    from .pipeline import Options, option_defaults

    plain = [field.name for field in fields(Options) if field.name not in ("pass_options", "inductor_options")]
    return [f"{name}=" for name in (*plain, *sorted(option_defaults()))]


FILE = click.argument("file", metavar="FILE.py[:NAME]", shell_complete=python_files)
OPTIONS = click.option(
    "--option", "options", multiple=True, metavar="K=V", shell_complete=complete(option_names),
    help="An option of the compiler; repeatable.",
)  # fmt: skip
JSON = click.option("--json", "as_json", is_flag=True, help="Print data.")


# ---- output ----


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done and for how long; only if stderr, to which it is written, is a terminal.

    Nothing may be printed meanwhile: it would end up in the same line.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(message, total=None)
        yield lambda text: progress.update(task, description=text)


def only_data_on_stdout(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """For the user's code, which may print: with --json, its output goes to stderr, so that stdout has only JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
