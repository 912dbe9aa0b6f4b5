"""When a compile fails: the same program compiled in a simpler way, one warning, and a file that reproduces it."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from . import _private
from .errors import TriptychError
from .options import Options
from .passes.session import Session

log = logging.getLogger("triptych")


@dataclass(frozen=True)
class Way:
    """One way to compile a program; `outcome` says in the warning what became of the program."""

    outcome: str
    compile: Callable[[], Callable[..., Any]]
    breaks_graph: bool = False
    """An error that Dynamo answers with a graph break is left to Dynamo: our passes have not caused it."""
    without_us: str = ""
    """What of Triptych this way leaves out, as a phrase: an error that is the same there is not Triptych's own."""


def first_that_compiles(ways: Sequence[Way], session: Session, reproduce: Callable[[Exception], str]) -> Any:
    """The result of the first way that does not raise, with a warning if that is not the first of all.

    If every way fails, the error of the first one is raised. `reproduce` writes the reproduction of an error and
    says where it is.
    """
    first_error: Exception | None = None
    likewise = ""
    for number, way in enumerate(ways):
        try:
            with falling_back() if number else contextlib.nullcontext():
                compiled = way.compile()
        except Exception as error:
            if is_deliberate(error) or (way.breaks_graph and isinstance(error, _private.answered_by_graph_break)):
                raise
            log.debug("failed, so not: the program %s", way.outcome, exc_info=True)
            if first_error is None:
                first_error, activity = error, session.activity
            elif way.without_us and _same_failure(first_error, error):
                likewise = way.without_us
            continue
        if first_error is not None:
            _warn(session, _message(first_error, activity, likewise, way.outcome, reproduce(first_error)))
        return compiled
    assert first_error is not None
    raise first_error


def is_deliberate(error: Exception) -> bool:
    """Is the error a message to the user or to Dynamo rather than a failure of the compile?"""
    return isinstance(error, (TriptychError, _private.RestartAnalysis, _private.SkipFrame, _private.Unsupported))


def reproduction(gm: GraphModule, example_inputs: Sequence[Any], options: Options, error: Exception) -> str:
    """Write the captured program as a runnable file, and say how to run it."""
    from .repro.write import write_repro  # needed only for a failure

    directory = Path(tempfile.gettempdir()) / "triptych-repro"
    path = write_repro(gm, example_inputs, options, error, directory)
    return f"To reproduce it: python {path}" if path is not None else "No reproduction could be written"


def require_eager_draws(gm: GraphModule) -> None:
    """Raise if the graph draws random numbers that only Inductor's kernels can draw again from a seed.

    Run eagerly, `inductor_random` ignores its seed: a backward that draws the forward's numbers again would get others.
    """
    prims = _private.generator_prims
    for node in gm.graph.nodes:
        if node.target in (prims.random, prims.randint):
            raise RuntimeError(f"{node.name} draws numbers again that only a kernel can")


# ---- stock Inductor must not lead back here: a program may have replaced Inductor by our backend ----

_falling_back: contextvars.ContextVar[bool] = contextvars.ContextVar("triptych_falling_back", default=False)


@contextlib.contextmanager
def falling_back() -> Iterator[None]:
    token = _falling_back.set(True)
    try:
        yield
    finally:
        _falling_back.reset(token)


def refuse_to_start_again() -> None:
    """Raise if the compile that begins here was itself started as a fallback of ours."""
    if _falling_back.get():
        raise RuntimeError("stock Inductor was asked to compile this program, and led back to Triptych")


def _same_failure(first: Exception, other: Exception) -> bool:
    """Do two errors say the same? Inductor puts the class of an error before its message when it raises it again."""
    what, kind = _first_line(first), type(first)
    if what and what != _first_line(other):
        return any(line.endswith(f"{kind.__name__}: {what}") for line in str(other).splitlines())
    return bool(what) or kind is type(other)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _message(error: Exception, activity: str, likewise: str, outcome: str, reproduction: str) -> str:
    also = f" It fails in the same way {likewise}." if likewise else ""
    failure = f"{type(error).__name__}: {_first_line(error)}"
    return (
        f"Triptych failed to compile a program, which {outcome} instead. The failure, while {activity}: "
        f"{failure}{'' if failure.endswith(('.', '!', '?')) else '.'}{also} {reproduction}; "
        "options={'on_error': 'raise'} shows the whole error."
    )


def _warn(session: Session, message: str) -> None:
    session.warnings.append(message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)
