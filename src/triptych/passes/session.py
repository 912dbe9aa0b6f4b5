"""One run of the flow over one captured program: its options and everything that was recorded."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from .. import _private
from ..ir.graph_copies import snapshot
from ..ir.origins import Origins
from ..ir.values.buffers import KnownBuffers
from ..options import Options
from .record import Listing, PassRecord
from .rewrite_limit import RewriteCount, count_of_process, limit_of_process, report, report_compile, reporting

if TYPE_CHECKING:
    from ..communication.timeline import Timeline

PACKAGE = str(Path(__file__).parent.parent)

RESPELLS = frozenset(
    ("one_spelling", "arguments", "operands_listed", "index_in_steps", "module_to_function", "move_up")
)
"""The rules of stage 1 after which autograd differentiates the same operations as before."""


@dataclass(repr=False)
class Session:
    """The record of one compile; a frame that is compiled again gets another attempt number."""

    options: Options
    compile_id: str = ""
    attempt: int = 0
    caller: str = ""
    """For a function of the package that was called directly, not by Dynamo: its name and the line of the call."""
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    """The thread that compiled the forward; a backward is compiled where it first runs."""
    opened: float = field(default_factory=time.perf_counter)
    observed: bool = False
    """The compile is observed: keep listings, graphs and kernels."""
    recorders: tuple[Recorder, ...] = ()
    """Notified whenever a graph of the program has been compiled."""
    rewrite_limit: int | None = None
    """Stop rewriting after this many rewrites; a bisection varies this number."""
    passes_off: bool = False
    """Only required passes run: for a program that raises in eager, or that failed to compile with all passes."""
    activity: str = "reading the captured graph"
    """What the compile is doing now, for the message if it fails."""
    origins: Origins | None = None
    """Where the inputs of the program come from."""
    buffers: KnownBuffers | None = None
    """What the buffers of the program hold, if they may be read."""
    records: list[PassRecord] = field(default_factory=list)
    logged: int = 0
    """How many of the records the log has summed up."""
    graphs: dict[str, GraphModule] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    kernel_nodes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By graph: the nodes that each call of a kernel computes, under the kernel's name and the number of the call."""
    replays: dict[str, str] = field(default_factory=dict)
    """By graph on a GPU: whether it is replayed as a CUDA graph, or why not."""
    lowered: dict[str, GraphModule] = field(default_factory=dict)
    """By graph: what code generation got, after all passes. Kernels are named by the nodes of these graphs."""
    runnable: dict[str, GraphModule] = field(default_factory=dict)
    """By graph: what runs node by node, without code generation."""
    listings: dict[str, Listing] = field(default_factory=dict)
    timelines: dict[str, tuple[Timeline, Timeline]] = field(default_factory=dict)
    """By graph: when it computes and communicates, before and after stage 3; only graphs that communicate."""
    warnings: list[str] = field(default_factory=list)

    count: RewriteCount = field(default_factory=RewriteCount)
    """Rewrites so far; sessions that share a limit share the count."""

    @property
    def rewrites(self) -> int:
        return sum(r.rewrites for r in self.records)

    @property
    def rules_before_autograd(self) -> set[str]:
        """The rules of stage 1 that fired and changed more than how an operation is written."""
        return {r for record in self.records if record.stage == "pre_grad" for r in +record.fired} - RESPELLS

    @property
    def rewritten_before_autograd(self) -> bool:
        """Has stage 1 changed the operations that autograd differentiates?"""
        return bool(self.rules_before_autograd)

    def __repr__(self) -> str:
        graphs = ", ".join(self.graphs) or "none kept"
        return f"<Session {self.compile_id or 'without a frame'}: {len(self.records)} passes, graphs: {graphs}>"

    @property
    def rewrites_left(self) -> int | None:
        """How many more rewrites may be made; None: any number."""
        if self.rewrite_limit is None:
            return None
        return 0 if self.count.stopped else max(self.rewrite_limit - self.count.made, 0)

    def keep(self, name: str, gm: GraphModule) -> None:
        """Keep the graph as it is now, if the compile is observed."""
        if self.observed:
            self.graphs[name] = snapshot(gm)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out the recorders."""
        return {**vars(self), "recorders": ()}

    def graph_compiled(self) -> None:
        """Tell the recorders that a graph of this program can run now."""
        for recorder in self.recorders:
            recorder.on_compiled()

    def open_listing(self, place: str, lines: list[str]) -> Listing:
        """The listing of a graph in a stage; another one if the stage runs again and the graph has changed since."""
        earlier = [key for key in self.listings if key.partition("#")[0] == place]
        if earlier and self.listings[earlier[-1]].latest == lines:
            return self.listings[earlier[-1]]
        key = f"{place}#{len(earlier) + 1}" if earlier else place
        listing = self.listings[key] = Listing(lines)
        return listing

    def add(self, record: PassRecord) -> None:
        """Keep the record of a pass that has run, and count its rewrites."""
        self.records.append(record)
        if not record.required:
            self.count.made += record.rewrites
            report(record, self.rewrite_limit)


@dataclass
class _Watcher:
    """Collects sessions, and may limit the number of rewrites that they make all together."""

    sessions: list[Session] = field(default_factory=list)
    rewrite_limit: int | None = None
    count: RewriteCount = field(default_factory=RewriteCount)


_watchers: ContextVar[tuple[_Watcher, ...]] = ContextVar("triptych_watchers", default=())
"""Per thread and context: a program that another thread compiles at the same time must not be collected.

The backward graph may be compiled on a thread of autograd's; it belongs to the session of its forward, which was opened
where the model was called.
"""


def is_watched() -> bool:
    """Is this thread watched? Then it compiles in order to explain, not to run."""
    return bool(_watchers.get())


@dataclass(eq=False)
class Recorder:
    """Collects the sessions of all threads, except those of compiles that are watched."""

    sessions: list[Session] = field(default_factory=list)
    on_compiled: Callable[[], None] = lambda: None
    """Called on the thread that compiled a graph, as soon as the graph can run."""


_recorders: tuple[Recorder, ...] = ()
"""Of the whole process; replaced as a whole, so that a thread reads either the old tuple or the new one."""
_recorders_change = threading.Lock()


def add_recorder(recorder: Recorder) -> None:
    global _recorders
    with _recorders_change:
        _recorders = (*_recorders, recorder)


def remove_recorder(recorder: Recorder) -> None:
    global _recorders
    with _recorders_change:
        _recorders = tuple(one for one in _recorders if one is not recorder)


def open_session(options: Options, caller: str = "") -> Session:
    """A new session, which is added to those of the watchers or recorders.

    Dynamo may compile a frame more than once, each time with another attempt number. Without Dynamo, a function of the
    package was called directly.
    """
    context = _private.CompileContext.try_get()
    if context is None:
        caller = caller or call_site()
    compile_id, attempt = ("", 0) if context is None else (str(context.compile_id), context.attempt)
    watchers = _watchers.get()
    recorders = () if watchers else _recorders
    session = Session(
        with_torch_settings(options), compile_id, attempt, caller,
        observed=bool(watchers or recorders) or reporting(), recorders=recorders,
    )  # fmt: skip
    limiting = next((w for w in reversed(watchers) if w.rewrite_limit is not None), None)
    if limiting is not None:
        session.rewrite_limit, session.count = limiting.rewrite_limit, limiting.count
    elif (limit := limit_of_process()) is not None or reporting():
        session.rewrite_limit, session.count = limit, count_of_process
    for sessions in (*(w.sessions for w in watchers), *(r.sessions for r in recorders)):
        sessions.append(session)
    report_compile()
    return session


def call_site() -> str:
    """Which function of the package was called, and in which line: "joint_graph_passes called at tool.py:7"."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        name, frame = frame.f_code.co_name, frame.f_back
    return name if frame is None else f"{name} called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def with_torch_settings(options: Options) -> Options:
    """The options, with those that were not given taken from torch's settings. These are read once for a program: its
    backward is compiled later, and must draw the numbers that its forward drew."""
    if options.fallback_random is None:
        options = replace(options, fallback_random=_private.inductor_config.fallback_random)
    return options


@contextlib.contextmanager
def watching(rewrite_limit: int | None = None) -> Iterator[list[Session]]:
    """Collect every session opened inside; each keeps its listings, graphs and kernels.

    With a `rewrite_limit`, all of them together make at most this many rewrites.
    """
    watcher = _Watcher(rewrite_limit=rewrite_limit)
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield watcher.sessions
    finally:
        _watchers.reset(token)
