"""Times on this device what its model cannot predict, once for each question.

An answer comes from memory, from disk, where earlier processes stored theirs, from those that the package brings for
known devices, or from a measurement now. A measurement counts only if its best rounds agree. One that does not, after
some repetitions, is no answer: the model decides, for the whole process, so that a program gets the same decisions
again. One that is steady but far from the model is used in this process and not stored.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import math
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import _private
from .answers import brought_answer
from .device import DeviceModel
from .parts import Part
from .store import add_to_store, read_store
from .timing import Run, apart_from_the_program, rounds_in_turns, rounds_on_gpu
from .work import Work

log = logging.getLogger("triptych")

SHARE = 0.25
"""The fraction of a GPU's free memory that a measurement may use."""
HOST_BYTES = 1 << 30
"""The memory that a measurement on a CPU may use."""
LONGEST_ON_CPU = 0.25
"""Work that takes a CPU longer than this many seconds is not measured."""

MEASUREMENTS = "measurements.json"

AGREEING = 3
"""A measurement counts if this many of its rounds agree."""
SPREAD = 0.15
"""They agree if the slowest of them takes at most this much longer than the fastest, as a fraction of its time."""
ATTEMPTS = 3
"""How often a measurement is made until its rounds agree."""
FAR, LEAST = 10.0, 1e-6
"""A time that is so many times as long as the modelled one, or as these seconds, is not stored: no kernel of a GPU is
shorter, however little it does."""


@dataclass(frozen=True)
class Clocked:
    """A measured time, in seconds, and how far the best rounds of the measurement lie apart."""

    seconds: float
    spread: float = 0.0


NO_ANSWER = ()
Times = tuple[Clocked, ...]
"""The answer to a question: the times of all work that was timed together; empty if the clock gives none."""

_known: dict[str, Times] = {}


MEASURING = "triptych.tuning"
"""The step of a compile, in torch's trace, in which something is measured."""


class _Questions(threading.local):
    """Of this thread: how many questions were asked, and how many of them were answered without a measurement."""

    asked = 0
    answered = 0


questions = _Questions()


def measuring_allowed() -> bool:
    """May a choice depend on measured times? Not if the user asks for the same numbers in every run: the alternatives
    round differently, and another one may be the fastest in the next process."""
    config = _private.inductor_config
    # torch has batch_invariant since 2.13
    wants_same_numbers = config.deterministic or getattr(config, "batch_invariant", False)
    return not wants_same_numbers and not torch.are_deterministic_algorithms_enabled()


def clocked(old: Work, new: Work) -> tuple[Clocked, Clocked] | None:
    """The measured times of two forms; None if one of them cannot be timed or gives no steady time."""
    if any(work.on_every_rank or not work.by_clock for work in (old, new)) or not measuring_allowed():
        return None
    measure = _on_cpu if old.device.type == "cpu" else _on_gpu
    return measure(old, new)


# ---- on a GPU: part by part ----


def _on_gpu(old: Work, new: Work) -> tuple[Clocked, Clocked] | None:
    if old.device.type != "cuda":
        return None
    times = [_form_on_gpu(work) for work in (old, new)]
    return None if times[0] is None or times[1] is None else (times[0], times[1])


def _form_on_gpu(work: Work) -> Clocked | None:
    """A launch is work of the host, so its cost is that of the model."""
    model, total, spread = work.model, 0.0, 0.0
    for part in work.parts:
        busy = part_on_gpu(part, work.device, model)
        if busy is None:
            return None
        total, spread = total + part.launches * model.launch + busy.seconds, max(spread, busy.spread)
    return Clocked(max(total, work.calls * model.operator), spread)


def part_on_gpu(part: Part, device: torch.device, model: DeviceModel) -> Clocked | None:
    """How long a part keeps the GPU busy. What is part of another kernel is modelled, and so is what takes no time."""
    seconds = part.seconds(model)
    if not part.launches or not seconds:
        return Clocked(seconds)
    like = part.like()
    modelled = like.seconds(model)
    times = _ask(
        device, [like.question(device)], [modelled], lambda: _rounds_on_gpu(like, device),
        lambda name, question: brought_answer(name, question, like.seconds),
    )  # fmt: skip
    if not times:
        return None
    return Clocked(times[0].seconds * (seconds / modelled if modelled else 1.0), times[0].spread)


def _rounds_on_gpu(part: Part, device: torch.device) -> list[list[float]] | None:
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    free, _ = torch.cuda.mem_get_info(device)
    if part.memory > SHARE * free:
        return None
    with torch.cuda.device(device):
        run = part.prepare(device)
        return None if run is None else [rounds_on_gpu(run)]


# ---- on a CPU: both forms in turns, because other load slows whatever runs beside it ----


def _on_cpu(old: Work, new: Work) -> tuple[Clocked, Clocked] | None:
    """What is part of another kernel cannot be timed by itself: it is modelled, as on a GPU."""
    kernels = [[part for part in work.parts if part.launches] for work in (old, new)]
    alike, model = [[part.like() for part in parts] for parts in kernels], old.model
    modelled = [sum(part.modelled(model) for part in parts) for parts in alike]
    needed = sum(part.memory for parts in alike for part in parts)
    if not all(alike) or max(modelled) > LONGEST_ON_CPU or needed >= HOST_BYTES:
        return None
    device = torch.device("cpu")
    texts = [" + ".join(_counted(part.question(device) for part in parts)) for parts in alike]

    def measure() -> list[list[float]] | None:
        runs = [_together(parts, device) for parts in alike]
        return None if None in runs else rounds_in_turns([run for run in runs if run is not None])

    times = _ask(device, texts, modelled, measure)
    if not times:
        return None
    forms = []
    for work, parts, of_like, measured in zip((old, new), kernels, modelled, times):
        own = sum(part.modelled(model) for part in parts)
        scaled = measured.seconds * (own / of_like if of_like else 1.0)
        forms.append(replace(measured, seconds=scaled + work.seconds() - own))
    return forms[0], forms[1]


def _together(parts: Sequence[Part], device: torch.device) -> Run | None:
    """All parts in a row."""
    runs = [part.prepare(device) for part in parts]
    if None in runs:
        return None

    def run() -> None:
        for one in runs:
            one()  # type: ignore[misc]

    return run


def _counted(questions: Any) -> list[str]:
    return [text if (n := len(list(group))) == 1 else f"{n} x {text}" for text, group in itertools.groupby(questions)]


# ---- questions and answers ----


def _nowhere(name: str, question: str) -> float | None:
    return None


def _ask(
    device: torch.device, texts: Sequence[str], modelled: Sequence[float],
    measure: Callable[[], list[list[float]] | None], known_elsewhere: Callable[[str, str], float | None] = _nowhere,
) -> Times:  # fmt: skip
    """The answer to questions that are asked together; empty if there is none. `measure` returns the rounds of each."""
    name = device_name(device)
    question = " / ".join(texts)
    key = f"{name} | torch {torch.__version__} | {question}"
    questions.asked += 1
    if key not in _known:
        for stored, times in stored_answers().items():
            _known.setdefault(stored, times)  # what this process has used once, it goes on using
    if key not in _known and (brought := known_elsewhere(name, question)) is not None:
        _known[key] = (Clocked(brought),)
    if key in _known:
        questions.answered += 1
    else:
        with _private.dynamo_timed(MEASURING):
            _known[key] = _measured(device, key, question, modelled, measure)
    return _known[key]


def _measured(
    device: torch.device, key: str, question: str, modelled: Sequence[float],
    measure: Callable[[], list[list[float]] | None],
) -> Times:  # fmt: skip
    rounds: list[list[float]] = [[] for _ in modelled]
    far = False
    for _ in range(ATTEMPTS):
        try:
            with apart_from_the_program(device):
                more = measure()
        except Exception as error:  # no memory after all, no such kernel, or one that Triton does not compile
            log.info("not measured: %s: %s", question, error)
            return NO_ANSWER
        if more is None:
            return NO_ANSWER
        rounds = [[*before, *now] for before, now in zip(rounds, more)]
        times = tuple(map(agreed, rounds))
        far = any(t.seconds > FAR * max(expected, LEAST) for t, expected in zip(times, modelled))
        if all(t.spread <= SPREAD for t in times) and not far:
            break
    if any(t.spread > SPREAD for t in times):
        log.info("no steady time, so the model decides: %s: %s", question, times)
        return NO_ANSWER
    if far:
        log.info("far from the model, so not stored: %s: %s", question, times)
    else:
        add_to_store(MEASUREMENTS, key, [[t.seconds, round(t.spread, 3)] for t in times])
    return times


def agreed(rounds: Sequence[float]) -> Clocked:
    """The best of some rounds, because other work on the machine only adds to a time. How much longer the slowest of
    the best few took is the spread; too few rounds say nothing of it."""
    best = sorted(rounds)[:AGREEING]
    if len(best) < AGREEING:
        return Clocked(best[0], math.inf)
    return Clocked(best[0], best[-1] / best[0] - 1)


def stored_answers() -> dict[str, Times]:
    """The answers on disk. Anything that cannot be a time is measured again."""
    answers = {}
    for key, value in read_store(MEASUREMENTS).items():
        if isinstance(value, list) and value and all(map(_is_time, value)):
            answers[key] = tuple(Clocked(float(seconds), float(spread)) for seconds, spread in value)
    return answers


def forget() -> None:
    """Drop the answers that this process has in memory."""
    _known.clear()


def _is_time(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    numbers = all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in value)
    return numbers and 0 < value[0] < math.inf and 0 <= value[1] <= SPREAD


# ---- names of devices ----


@functools.cache
def _processor() -> str:
    """The name of the CPU, and the vector instructions that torch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags")))
    described = " ".join(itertools.islice(names, 2)) or platform.processor()
    return f"CPU {hashlib.sha256(described.encode()).hexdigest()[:12]} {torch.backends.cpu.get_cpu_capability()}"


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        onednn = "" if torch.backends.mkldnn.enabled else " without oneDNN"
        return f"{_processor()} x {torch.get_num_threads()}{onednn}"
    if not torch.cuda.is_available():  # the graph is for a GPU of another machine
        return "a GPU that is not there"
    return torch.cuda.get_device_name(device)
