"""Where the time of a compile goes: phases that do not overlap.

Torch times the steps of a compile for its own trace, one inside the other. Each moment is counted for the innermost
step that is known here; a step that is not known, or that a release of torch does not time, is counted as part of the
step around it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from .. import _private
from ..cost.clock import MEASURING, questions
from .compile_events import compile_events
from .phrases import count, duration

if TYPE_CHECKING:
    from .frames import Frame

Clock = Callable[[], float]


def _phase(title: str, *events: str) -> float:
    """A phase: its title, and the names of the steps, in torch's trace, that belong to it."""
    return field(default=0.0, metadata={"title": title, "events": events})


@dataclass(frozen=True)
class CompileTimes:
    """Seconds of the compile of a frame, or of its backward, by phase. The phases are disjoint, and together they are
    the whole compile."""

    dynamo: float = _phase("Dynamo", "entire_frame_compile", "bytecode_tracing", "build_guards")
    """Dynamo captures the program and makes guards."""
    pre_grad: float = _phase("pre-grad", "triptych.pre_grad", "_recursive_pre_grad_passes")
    autograd: float = _phase("AOTAutograd", "create_aot_dispatcher_function", "aot_trace_joint_graph")
    """AOTAutograd traces the forward and the backward."""
    joint: float = _phase("joint", "triptych.joint", "triptych.freeze", "_recursive_joint_graph_passes")
    partition: float = _phase(
        "partition", "triptych.before_partition", "triptych.partition", "triptych.after_partition",
        "min_cut_rematerialization_partition",
    )  # fmt: skip
    """The joint graph is cut into forward and backward, with the passes right before and after."""
    post_grad: float = _phase("post-grad", "triptych.post_grad", "_recursive_post_grad_passes")
    before_codegen: float = _phase("before codegen", "triptych.before_codegen")
    tuning: float = _phase("tuning", MEASURING)
    """Alternatives are measured on the device, for whichever stage asks."""
    lowering: float = _phase(
        "lowering", "compile_fx_inner", "inductor_compile", "fx_codegen_and_compile", "GraphLowering.run",
        "Scheduler.__init__", "Scheduler.fused_nodes",
    )  # fmt: skip
    """Inductor lowers the graphs and schedules kernels."""
    codegen: float = _phase(
        "code generation", "code_gen", "GraphLowering.codegen", "GraphLowering.compile_to_fn",
        "GraphLowering.compile_to_module", "Scheduler.codegen", "PythonWrapperCodegen.generate",
        "CppWrapperCpu.generate", "CppWrapperGpu.generate",
    )  # fmt: skip
    """Inductor writes the source of kernels and of the code that calls them."""
    kernels: float = _phase(
        "kernels", "PyCodeCache.load_by_key_path", "async_compile.wait", "async_compile.precompile", "compile_file",
        "AotCodeCompiler.compile",
    )  # fmt: skip
    """Triton, or the C++ compiler, compiles the kernels."""
    other: float = _phase("other", "backend_compile", "entire_backward_compile")
    """The rest: imports, cache keys, what happens between the phases."""
    questions: int = 0
    """How often the cost model asked for a measurement."""
    answered: int = 0
    """How many of these questions were answered by an earlier measurement, in memory or on disk."""

    @property
    def seconds(self) -> float:
        return sum(self.phases().values())

    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order of the flow."""
        return {name: getattr(self, name) for name in TITLES}


TITLES = {one.name: one.metadata["title"] for one in fields(CompileTimes) if one.metadata}
"""What the phases are called where a person reads."""
PHASE_OF_EVENT = {event: one.name for one in fields(CompileTimes) for event in one.metadata.get("events", ())}
WHOLE = {"entire_frame_compile": False, "entire_backward_compile": True}
"""The steps that are a whole compile. Is it that of a backward?"""


class _Running(threading.local):
    """The compile that a thread is at."""

    events: list[tuple[str, str]]
    """The steps that have begun, each with its phase."""

    def __init__(self) -> None:
        self.events = []
        self.seconds: dict[str, float] = {}
        self.since = 0.0
        self.compile_id = ""
        self.asked = self.answered = 0


class PhaseClock:
    """Collects the times of all compiles from `start` to `stop`, by the id of their frame."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._running = _Running()
        self._finished: dict[tuple[str, bool], list[CompileTimes]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        compile_events.add(self.event)

    def stop(self) -> None:
        compile_events.remove(self.event)

    def take(self, compile_id: str, backward: bool) -> CompileTimes | None:
        """The times of the first such compile that have not been taken yet; ids begin anew after a reset of Dynamo."""
        with self._lock:
            waiting = self._finished.get((compile_id, backward))
            return waiting.pop(0) if waiting else None

    def event(self, name: str, begins: bool) -> None:
        """A step begins or ends on this thread."""
        running = self._running
        if not running.events and not (begins and name in WHOLE):
            return
        now = self._clock()
        if running.events:
            phase = running.events[-1][1]
            running.seconds[phase] = running.seconds.get(phase, 0.0) + now - running.since
        else:
            running.seconds, running.asked, running.answered = {}, questions.asked, questions.answered
            running.compile_id = ""
        running.since = now
        context = _private.CompileContext.try_get()
        if not running.compile_id and context is not None:
            running.compile_id = str(context.compile_id)
        if begins:
            around = running.events[-1][1] if running.events else "other"
            running.events.append((name, PHASE_OF_EVENT.get(name, around)))
        elif any(name == event for event, _ in running.events):
            while running.events.pop()[0] != name:  # a step that an error ended says nothing
                pass
            if not running.events:
                self._finish(running, WHOLE[name])

    def _finish(self, running: _Running, backward: bool) -> None:
        asked, answered = questions.asked - running.asked, questions.answered - running.answered
        times = CompileTimes(**running.seconds, questions=asked, answered=answered)
        with self._lock:
            self._finished.setdefault((running.compile_id, backward), []).append(times)


MOST_FRAMES = 4
OTHER = "imports and cache keys"
"""What the time outside all phases goes to, for the most part."""
LEAST = 0.01
"""The share of a compile below which a phase is not named in a line."""


def compile_line(times: CompileTimes) -> str:
    """In one line: how long the compile took, and which phases took most of it."""
    whole = times.seconds
    named = {name: seconds for name, seconds in times.phases().items() if seconds >= LEAST * whole and name != "other"}
    longest_first = sorted(named.items(), key=lambda item: -item[1])
    parts = [f"{TITLES[name]} {duration(seconds)}" for name, seconds in longest_first]
    if (rest := whole - sum(named.values())) >= LEAST * whole:
        small = [TITLES[name] for name, seconds in times.phases().items() if seconds and name not in (*named, "other")]
        parts.append(f"other {duration(rest)} ({', '.join([*small, OTHER])})")
    if times.questions:
        parts.append(f"{count(times.questions, 'question')} to the device, {times.answered} answered before")
    return f"{duration(whole)}: {', '.join(parts)}"


def compile_lines(frames: Sequence[Frame]) -> list[str]:
    """A line for the compile of each frame and one for its backward; of many frames, the sum."""
    shown: list[tuple[str, CompileTimes, CompileTimes]]
    shown = [(frame.name, frame.times, frame.backward_times) for frame in frames if frame.times.seconds]
    if len(shown) > MOST_FRAMES:
        forwards, backwards = (functools.reduce(added, times) for times in list(zip(*shown))[1:])
        shown = [(f"{len(shown)} compiles", forwards, backwards)]
    lines = []
    for name, times, backward in shown:
        which = f" of {name}" if len(shown) > 1 or len(frames) > 1 else ""
        lines.append(f"compile{which}: {compile_line(times)}")
        if backward.seconds:
            lines.append(f"compile of the backward{which}: {compile_line(backward)}")
    return lines


def added(times: CompileTimes, more: CompileTimes) -> CompileTimes:
    """The times of two compiles together."""
    return replace(times, **{one.name: getattr(times, one.name) + getattr(more, one.name) for one in fields(times)})
