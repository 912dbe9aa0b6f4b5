"""What Dynamo compiled: which functions, which of them again and why, and where it broke the graph.

Dynamo compiles a frame: a call of a function, or the rest of it after a graph break. A frame becomes one captured
program, or none if it has no tensor operation.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from .. import _private
from ..errors import dynamo_reason
from ..passes.session import Session, is_watched
from .compile_times import CompileTimes, PhaseClock, added

RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
TORCH = str(Path(_private.torch.__file__).parent)


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ended a graph: what follows is another program, or runs in Python."""

    reason: str
    """The first line of what Dynamo says."""
    source: str
    """The user's line, as `model.py:31`."""
    explanation: str = ""
    """All that Dynamo says: what it cannot trace, and hints."""

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" if self.source else self.reason


@dataclass
class Frame:
    """One compile of one function by Dynamo."""

    compile_id: str
    """As Dynamo counts: the frame, and how often it was compiled before. A reset of Dynamo starts again at 0/0."""
    function: str
    source: str
    """Where the function begins, as `model.py:31`; after a graph break, where it goes on."""
    thread: str = ""
    reason: str = ""
    """Why the function was compiled again: the guard of the earlier compile that failed."""
    breaks: list[GraphBreak] = field(default_factory=list)
    failure: str = ""
    """Why Dynamo gave up on the function, which runs in Python then."""
    seconds: float = 0.0
    """For the forward: Dynamo, passes and code generation."""
    backward_seconds: float = 0.0
    """For the backward, which is compiled when it first runs."""

    times: CompileTimes = CompileTimes()
    """Where `seconds` went, by phase."""
    backward_times: CompileTimes = CompileTimes()
    """Where `backward_seconds` went."""

    finished: float = field(default_factory=time.perf_counter)

    @property
    def name(self) -> str:
        """The function, or "forward, resumed"; "a module of torch" for one of torch's own, which Dynamo wraps."""
        if resumed := RESUMED.match(self.function):
            return f"{resumed[1]}, resumed"
        return self.function if self.source else "a module of torch"

    def __str__(self) -> str:
        return f"{self.name}, {self.source}" if self.source else self.name

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "finished"}
        times = {name: vars(fields[name]) for name in ("times", "backward_times")}
        return {**fields, **times, "breaks": [vars(one) for one in self.breaks]}

    @property
    def is_recompile(self) -> bool:
        return bool(self.reason)


class FrameLog:
    """Collects the frames that Dynamo compiles from `start` on: of all threads, or of the one that starts it."""

    def __init__(self, own_thread_only: bool = False) -> None:
        self._frames: list[Frame] = []
        self._own_thread = threading.get_ident() if own_thread_only else None
        self._breaks_seen: list[Any] = []
        """Dynamo's list of graph breaks when it was last read."""
        self._last_figures: Any = None
        self._threads: dict[str, str] = {}
        """The name of the thread that compiles a frame, by compile id; empty for a frame that is not to be collected,
        because it is another thread's or an explanation's."""
        self._clock = PhaseClock()
        self._hook: Any = None
        self._lock = threading.RLock()
        """Never held while waiting for Dynamo's own lock, which Dynamo holds when it calls us."""

    def start(self) -> None:
        with self._lock:
            self._breaks_seen = list(_private.graph_break_reasons)
            self._new_figures()
        self._clock.start()
        _private.compile_callbacks.register_start_callback(self._frame_begins)
        self._hook = _private.register_bytecode_hook(self._frame_compiled)

    def stop(self) -> None:
        if self._hook is not None:
            self.detach()
            self._read_figures()

    def detach(self) -> None:
        """Remove the callbacks from Dynamo."""
        self._hook.remove()
        self._hook = None
        self._clock.stop()
        with contextlib.suppress(ValueError):  # a reset of Dynamo has removed it
            _private.compile_callbacks.remove_start_callback(self._frame_begins)

    @property
    def frames(self) -> list[Frame]:
        """All frames so far; what Dynamo says only after a compile is filled in now."""
        with self._lock:
            if self._hook is not None:
                self._read_figures()
            return list(self._frames)

    def _frame_begins(self, *_: Any) -> None:
        with self._lock:
            self._note_thread(self._compile_id())

    def _frame_compiled(self, code: CodeType, compiled: CodeType) -> None:
        """Dynamo calls this, holding its lock, when it has compiled a frame."""
        with self._lock:
            self._read_figures()
            compile_id = self._compile_id()
            breaks = self._new_breaks()
            # a reset of Dynamo drops the callback that says when a frame begins
            if self._note_thread(compile_id):
                source = source_of(code.co_filename, code.co_firstlineno)
                frame = Frame(compile_id, code.co_name, source, self._threads[compile_id], breaks=breaks)
                self._frames.append(frame)

    @staticmethod
    def _compile_id() -> str:
        context = _private.CompileContext.try_get()
        return "" if context is None else str(context.compile_id)

    def _note_thread(self, compile_id: str) -> bool:
        """Is the frame that this thread compiles one of those to collect?"""
        ours = not is_watched() if self._own_thread is None else self._own_thread == threading.get_ident()
        self._threads[compile_id] = threading.current_thread().name if ours else ""
        return ours

    def _new_breaks(self) -> list[GraphBreak]:
        reasons = list(_private.graph_break_reasons)
        seen = len(self._breaks_seen)
        # a reset of Dynamo empties its list
        is_continued = seen and len(reasons) >= seen and all(a is b for a, b in zip(reasons, self._breaks_seen))
        self._breaks_seen = reasons
        return [graph_break(one.reason, one.user_stack) for one in reasons[seen if is_continued else 0 :]]

    # ---- figures, which Dynamo records when it has finished a frame ----

    def _new_figures(self) -> Iterator[Any]:
        figures = _private.get_compilation_metrics()
        last = next((i for i, one in reversed(list(enumerate(figures))) if one is self._last_figures), -1)
        if figures:
            self._last_figures = figures[-1]
        return iter(figures[last + 1 :])

    def _read_figures(self) -> None:
        with self._lock:
            for figures in self._new_figures():
                self._read(figures)

    def _read(self, figures: Any) -> None:
        compile_id = str(figures.compile_id)
        # a frame whose beginning was not reported may be one of another thread
        thread = self._threads.get(compile_id, "" if self._own_thread is not None else "unknown")
        if not thread or getattr(figures, "is_runtime", False):
            return
        frame = next((one for one in reversed(self._frames) if one.compile_id == compile_id), None)
        is_backward = figures.is_forward is False
        times = self._clock.take(compile_id, is_backward)
        if is_backward:
            if frame is not None:
                frame.backward_seconds += (figures.duration_us or 0) / 1e6
                frame.backward_times = added(frame.backward_times, times or CompileTimes())
            return
        if frame is None or frame.seconds:  # not compiled at all; after a reset, ids begin anew
            if not figures.fail_type:
                return
            source = source_of(figures.co_filename or "", figures.co_firstlineno or 0)
            frame = Frame(compile_id, figures.co_name or "", source, thread)
            self._frames.append(frame)
        frame.seconds = figures.entire_frame_compile_time_s or 0.0
        frame.times = times or CompileTimes()
        if self._own_thread is None or self._was_compiled_before(frame):
            frame.reason = guard_failure(figures.recompile_reason or "")
        if figures.fail_type:
            where = source_of(figures.fail_user_frame_filename or "", figures.fail_user_frame_lineno or 0)
            failure = in_one_line(figures.fail_reason or figures.fail_type)
            frame.failure = f"{where}: {failure}" if where else failure


    def _was_compiled_before(self, frame: Frame) -> bool:
        """Was the same frame compiled earlier in this log? What the user's program compiled before does not count."""
        earlier = itertools.takewhile(lambda one: one is not frame, self._frames)
        return frame.compile_id.partition("/")[0] in {one.compile_id.partition("/")[0] for one in earlier}


def frames_of(sessions: Sequence[Session], frames: Sequence[Frame]) -> list[Frame | None]:
    """The frame that the program of each session comes from. Ids repeat after a reset of Dynamo; then time decides."""
    by_id: dict[str, list[Frame]] = {}
    for frame in frames:
        by_id.setdefault(frame.compile_id, []).append(frame)
    return [
        next((frame for frame in by_id.get(session.compile_id, ()) if frame.finished >= session.opened), None)
        for session in sessions
    ]


def in_order(sessions: Sequence[Session], frames: Sequence[Frame]) -> list[tuple[Frame | Session, list[int]]]:
    """What was compiled, in order: frames, and sessions of direct calls; each with the numbers of its programs."""
    programs: dict[int, list[int]] = {id(frame): [] for frame in frames}
    compiles: list[tuple[float, Frame | Session, list[int]]] = []
    for number, (session, frame) in enumerate(zip(sessions, frames_of(sessions, frames)), 1):
        if session.caller:
            compiles.append((session.opened, session, [number]))
        elif frame is not None:
            programs[id(frame)].append(number)
    compiles += [(frame.finished, frame, programs[id(frame)]) for frame in frames]
    return [(what, numbers) for _, what, numbers in sorted(compiles, key=lambda compile: compile[0])]


def program_label(session: Session, frame: Frame | None) -> str:
    """Where a captured program comes from: "forward, model.py:31" or "joint_graph_passes called at tool.py:7"."""
    if session.caller:
        return session.caller
    if frame is None:
        return session.compile_id
    return f"{frame}{', compiled again' if frame.is_recompile else ''}"


def graph_break(reason: str, stack: Any) -> GraphBreak:
    where = source_of(stack[-1].filename, stack[-1].lineno) if stack else ""
    if reason.startswith("generic_jump"):  # Dynamo's word for it says nothing to a user
        short = "a branch (if, while, and, or) that depends on the values of a tensor"
    elif reason.strip() == "step_unsupported":  # after a call in which Dynamo had to end the graph
        short = "Dynamo cannot trace what this line does, or calls; a break named before this one may say why"
    else:
        short = in_one_line(reason)
    return GraphBreak(short, where, reason.strip())


def in_one_line(reason: str) -> str:
    """What Dynamo says: its first line, and the explanation that follows, without the hints."""
    return dynamo_reason(reason) or reason.strip().partition("\n")[0]


def guard_failure(reason: str) -> str:
    """Dynamo's text of a guard that failed, such as `0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4`,
    without the compile id."""
    return re.sub(r"^\d+/\d+(_\d+)?: ", "", reason.strip().partition("\n")[0])


def source_of(path: str, line: int) -> str:
    """`model.py:31`; empty for a file of torch itself, where Dynamo wraps a module."""
    return f"{Path(path).name}:{line}" if path and not path.startswith(TORCH) else ""
