"""One run of the flow over one captured program: its options and everything that was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from .. import _private
from ..ir.origins import Origins
from ..options import Options
from .record import Listing, PassRecord


@dataclass
class Session:
    """The record of one compile; a frame that is compiled again gets another attempt number."""

    options: Options
    compile_id: str = ""
    attempt: int = 0
    observed: bool = False
    """Somebody is looking: keep listings, graphs and kernels."""
    rewrite_limit: int | None = None
    """Stop rewriting after this many rewrites: what a bisection turns."""
    origins: Origins | None = None
    """Where the inputs of the program come from."""
    records: list[PassRecord] = field(default_factory=list)
    graphs: dict[str, GraphModule] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def rewrites(self) -> int:
        return sum(r.rewrites for r in self.records)


_watchers: list[list[Session]] = []


def open_session(options: Options, compile_id: str = "", attempt: int = 0) -> Session:
    """A new session, handed to whoever is watching."""
    session = Session(with_torch_settings(options), compile_id, attempt, observed=bool(_watchers))
    for watcher in _watchers:
        watcher.append(session)
    return session


def with_torch_settings(options: Options) -> Options:
    """Options that were not given, from what the user set in torch. Read once for a program: its backward is compiled
    later, and must draw the numbers that its forward drew."""
    if options.fallback_random is None:
        options = replace(options, fallback_random=_private.inductor_config.fallback_random)
    return options


@contextlib.contextmanager
def watching() -> Iterator[list[Session]]:
    """Collect every session opened inside; each keeps its listings, graphs and kernels."""
    sessions: list[Session] = []
    _watchers.append(sessions)
    try:
        yield sessions
    finally:
        # by identity: two empty lists are equal
        _watchers[:] = [w for w in _watchers if w is not sessions]
