"""What all commands share: the group, a command with examples and short errors, options, a spinner."""

from __future__ import annotations

import ast
import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console

from . import __version__
from .errors import TriptychError


class Failed(click.ClickException):
    """An error as one line."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(f"triptych: {self.message}", err=True)


class WrongUse(Failed):
    """Something in the call or in the user's file has to change."""

    exit_code = 2


def command(name: str, short: str, *examples: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command with an example in its help, and errors without a traceback unless one is asked for."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, with_traceback: bool, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:
                if with_traceback:
                    traceback.print_exception(error)
                raise _failure(error, with_traceback) from error

        what = "Show where an error came from."
        option = click.option("--traceback", "with_traceback", is_flag=True, help=what)
        shown = "\n  ".join(examples)
        epilog = f"\b\nExample{'s' if len(examples) > 1 else ''}:\n  {shown}"
        return main.command(name, short_help=short, epilog=epilog)(option(run))

    return decorate


def _failure(error: Exception, with_traceback: bool) -> Failed:
    if isinstance(error, TriptychError):
        return WrongUse(str(error))
    hint = "" if with_traceback else " (--traceback shows where)"
    return Failed(f"{type(error).__name__}: {error}{hint}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="\b\nExample:\n  triptych demo")
@click.version_option(__version__, prog_name="triptych")
def main() -> None:
    """See what a graph-optimising compiler does to a PyTorch model, pass by pass."""


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


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner while something takes long; on a terminal only, and beside what is printed."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(message) as status:
        yield lambda text: status.update(text)
