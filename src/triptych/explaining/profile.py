"""Measured times of a compiled program: of a step, and of each kernel launch in it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..cost.estimate import OperationCost
from ..errors import TriptychError
from ..ir.facts import tensor_fact
from ..passes.session import Session
from .gpu_times import GpuWork, gpu_work, profiled
from .launches import Launch
from .probe import Event, Key, Probed

NOT_ATTRIBUTED = "not attributed"
ROUNDS, LEAST_ROUNDS = 30, 3
LONGEST = 3.0
"""Seconds after which no further round begins, if there were enough."""
WARM_UP = 2
GPU_STEPS = 3
"""Steps that are recorded with a GPU's own clock."""


@dataclass(frozen=True)
class TimedLaunch:
    """What one launch took in a step."""

    program: int
    launch: Launch
    seconds: float
    """Measured: on a GPU the kernels that it launches, otherwise the call. 0 if a step did not come by it."""
    calls: int
    """How often a step comes by it."""

    def to_dict(self) -> dict[str, Any]:
        launch = self.launch
        return {
            "program": self.program, "graph": launch.graph, "number": launch.number, "name": launch.name,
            "seconds": self.seconds, "estimate": estimate_of([launch]), "calls": self.calls,
            "nodes": list(launch.nodes), "rules": list(launch.rules), "passes": list(launch.passes),
            "module": launch.module, "sources": list(launch.sources),
        }  # fmt: skip


@dataclass(frozen=True)
class TimedPart:
    """What several launches took that have something in common."""

    name: str
    seconds: float
    estimate: float | None
    """Estimated; None if nothing is known of one of them."""
    launches: int
    total: float
    """Of a module: with the modules inside it. Otherwise the same as `seconds`."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Moment:
    """One thing that happened in the recorded step: when it began, in seconds after the step did, and how long."""

    launch: int
    """Its number in the list of launches; -1 for none of them."""
    name: str
    start: float
    seconds: float
    lane: str


@dataclass
class Profile:
    """Measured times of a step: a call of the model and, in training, its backward."""

    device: str
    """"cuda" if kernels run on a GPU, otherwise "cpu"."""
    wall_seconds: float
    """Of a step: the best of the rounds. On a CPU each part of the step at its best; and if torch uses one thread, by
    the clock of that thread, which leaves out what other programs on the machine take."""
    kernel_seconds: float
    """In kernels: on a GPU of all that it executed, on a CPU of the launches."""
    waiting_seconds: float | None
    """On a GPU: how long it waits for the host, the step less the kernels. None on a CPU."""
    rounds: int
    launches: list[TimedLaunch]
    step: list[Moment] = field(default_factory=list)
    """The recorded step, for a timeline."""

    @property
    def total_seconds(self) -> float:
        """What launches, regions and modules are parts of: on a GPU the time in kernels, on a CPU the step."""
        return self.kernel_seconds if self.waiting_seconds is not None else self.wall_seconds

    @property
    def not_attributed(self) -> float:
        """Seconds of the total that belong to no launch."""
        return max(0.0, self.total_seconds - sum(one.seconds for one in self.launches))

    @property
    def regions(self) -> list[TimedPart]:
        """By the passes and rules that made what is computed: one row for what nothing rewrote, one for the rest."""
        return self._parts(lambda launch: launch.region or AS_CAPTURED)

    @property
    def modules(self) -> list[TimedPart]:
        """By the innermost module to which all of a launch belongs."""
        parts = self._parts(lambda launch: launch.module or THE_MODEL)
        return [replace(part, total=_with_inner(part, parts)) for part in parts]

    def by_place(self) -> dict[tuple[int, str, int], float]:
        """What each launch took, by program, graph and number of the launch."""
        return {(one.program, one.launch.graph, one.launch.number): one.seconds for one in self.launches}

    def _parts(self, name_of: Callable[[Launch], str]) -> list[TimedPart]:
        groups: dict[str, list[TimedLaunch]] = defaultdict(list)
        for one in self.launches:
            groups[name_of(one.launch)].append(one)
        parts = [
            TimedPart(
                name, seconds := sum(one.seconds for one in group), estimate_of([one.launch for one in group]),
                len(group), seconds,
            )
            for name, group in groups.items()
        ]  # fmt: skip
        rest = TimedPart(NOT_ATTRIBUTED, self.not_attributed, None, 0, self.not_attributed)
        return [*sorted(parts, key=lambda part: -part.seconds), rest]

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "wall_seconds": self.wall_seconds,
            "kernel_seconds": self.kernel_seconds,
            "waiting_seconds": self.waiting_seconds,
            "not_attributed": self.not_attributed,
            "rounds": self.rounds,
            "launches": [one.to_dict() for one in self.launches],
            "regions": [part.to_dict() for part in self.regions],
            "modules": [part.to_dict() for part in self.modules],
        }


AS_CAPTURED = "no rule"
THE_MODEL = "(the model)"


def estimate_of(launches: Iterable[Launch]) -> float | None:
    """The estimated seconds of all of them; None if nothing is known of one."""
    costs: list[OperationCost | None] = [launch.cost for launch in launches]
    known = [cost.seconds for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


def _with_inner(part: TimedPart, parts: Sequence[TimedPart]) -> float:
    if part.name == NOT_ATTRIBUTED:
        return part.seconds
    inside = (p for p in parts if p.name != NOT_ATTRIBUTED)
    if part.name == THE_MODEL:
        return sum(p.seconds for p in inside)
    return sum(p.seconds for p in inside if p.name == part.name or p.name.startswith(f"{part.name}."))


# ---- measuring ----


@dataclass
class Subject:
    """A compiled program to be timed: `run(timed)` runs a step, inside the context manager `timed`."""

    run: Callable[[contextlib.AbstractContextManager[Any]], Any]
    sessions: Sequence[Session]
    steps: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float, list[Event]]] = field(default_factory=list)
    """When a step began and ended, and its launches."""

    def __post_init__(self) -> None:
        self.probed = Probed(self.sessions)
        self.on_gpu = any(_is_on_gpu(session) for session in self.sessions)
        # the time of a thread leaves out what other programs on the machine take, but also what other threads do
        self.clock = time.thread_time if torch.get_num_threads() == 1 and not self.on_gpu else time.perf_counter
        self.probed.probe.clock = self.clock

    def plain_step(self) -> None:
        clock = _Clock(self.clock, self.on_gpu)
        self.run(clock)
        self.steps.append(clock.ended - clock.began)

    def noted_step(self) -> None:
        clock = _Clock(self.clock, self.on_gpu)
        with self.probed.noting() as probe:
            probe.taken()
            self.run(clock)
        self.rounds.append((clock.began, clock.ended, probe.taken()))

    def profile(self) -> Profile:
        if not self.on_gpu:
            return profile_on_cpu(self)
        if not (work := self._work_of_gpu()):
            raise TriptychError("torch's profiler recorded no kernels of the GPU, so nothing is known of their times")
        return profile_on_gpu(self, work)

    def _work_of_gpu(self) -> list[list[GpuWork]]:
        """Of each of some steps: what the GPU did, and for which launch."""
        with self.probed.noting() as probe:
            probe.with_ranges = True
            try:
                trace = profiled(self.run, GPU_STEPS)
            finally:
                probe.with_ranges = False
                probe.taken()
        return gpu_work(trace, [launch for _, launch in self.probed.launches])


def profile_in_turns(subjects: Sequence[Subject]) -> list[Profile]:
    """Profiles whose rounds alternate: other load on the machine then falls on all of them alike."""
    for subject in subjects:
        for _ in range(WARM_UP):
            subject.run(contextlib.nullcontext())
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - began > LONGEST * len(subjects):
            break
        for subject in subjects if number % 2 else reversed(subjects):
            if subject.on_gpu:  # where notes take the host time that the kernels do not wait for
                subject.plain_step()
            subject.noted_step()
    return [subject.profile() for subject in subjects]


class _Clock:
    """Notes when what runs inside began and ended, on a GPU with all that it had to do."""

    def __init__(self, clock: Callable[[], float], on_gpu: bool) -> None:
        self.clock = clock
        self.wait = torch.cuda.synchronize if on_gpu else lambda: None
        self.began = self.ended = 0.0

    def __enter__(self) -> None:
        self.wait()
        self.began = self.clock()

    def __exit__(self, *raised: Any) -> None:
        self.wait()
        self.ended = self.clock()


def _is_on_gpu(session: Session) -> bool:
    graphs = [*session.lowered.values(), *session.runnable.values(), *session.graphs.values()]
    tensors = (tensor_fact(node) for gm in graphs for node in gm.graph.nodes)
    return any(tensor is not None and tensor.device.type == "cuda" for tensor in tensors)


def profile_on_cpu(subject: Subject) -> Profile:
    """Of each launch, and of what lies between two of them, the best round counts: other work on the machine only adds
    to the time, and it rarely hits the same place in every round."""
    # a step may depend on data: only rounds of the most frequent kind are compared
    kinds = Counter(_numbers(events) for _, _, events in subject.rounds)
    usual = kinds.most_common(1)[0][0]
    rounds = [one for one in subject.rounds if _numbers(one[2]) == usual]
    best = [min(seconds) for seconds in zip(*([end - begin for _, begin, end in events] for *_, events in rounds))]
    between = [min(seconds) for seconds in zip(*(_between(*one) for one in rounds))]
    kernels = sum(best)
    wall = sum(between) + kernels
    keys, calls = subject.probed.launches, Counter(usual)
    began, ended, events = min(rounds, key=lambda r: r[1] - r[0])
    step = [
        Moment(-1, "step", 0.0, ended - began, "step"),
        *(Moment(n, keys[n][1].name, begin - began, end - begin, "launches") for n, begin, end in events),
    ]
    timed = _timed(keys, _sums(zip(usual, best)), calls)
    return Profile("cpu", wall, kernels, None, len(rounds), timed, step)


def _numbers(events: Sequence[Event]) -> tuple[int, ...]:
    return tuple(number for number, _, _ in events)


def _between(began: float, ended: float, events: Sequence[Event]) -> list[float]:
    """The times before the first launch, between two of them, and after the last one."""
    ends, begins = [began, *(end for *_, end in events)], [*(begin for _, begin, _ in events), ended]
    return [begin - end for begin, end in zip(begins, ends)]


def profile_on_gpu(subject: Subject, steps: Sequence[Sequence[GpuWork]]) -> Profile:
    """The step is timed without a profiler, which slows the host; the kernels by the GPU's own clock."""
    best: dict[int, float] = {}
    for work in steps:
        for number, seconds in _sums((one.launch, one.seconds) for one in work).items():
            best[number] = min(seconds, best.get(number, seconds))
    keys, events = subject.probed.launches, subject.rounds[-1][2]
    for number, begin, end in events:
        if keys[number][1].on_host:  # a C++ kernel of a program whose other kernels run on the GPU
            best[number] = best.get(number, 0.0) + end - begin
    kernels, wall = sum(best.values()), min(subject.steps)
    last = steps[-1]
    start = min(one.start for one in last)
    step = [Moment(one.launch, one.name, one.start - start, one.seconds, one.lane) for one in last]
    timed = _timed(keys, best, Counter(_numbers(events)))
    return Profile("cuda", wall, kernels, max(0.0, wall - kernels), len(subject.steps), timed, step)


def _timed(keys: Sequence[Key], seconds: Mapping[int, float], calls: Mapping[int, int]) -> list[TimedLaunch]:
    return [
        TimedLaunch(program, launch, seconds.get(number, 0.0), calls.get(number, 0))
        for number, (program, launch) in enumerate(keys)
    ]


def _sums(parts: Iterable[tuple[int, float]]) -> dict[int, float]:
    sums: dict[int, float] = defaultdict(float)
    for number, seconds in parts:
        sums[number] += seconds
    return dict(sums)
