"""Measures what the model of a device cannot predict, once per question; answers are cached in memory and on disk."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import math
import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _private
from .store import add_to_store, read_store
from .timing import Work, apart_from_the_program, seconds, seconds_in_turns, seconds_on_cpu

log = logging.getLogger("triptych")

SHARE = 0.25
"""The fraction of a GPU's free memory that a measurement may use."""
HOST_BYTES = 1 << 30
"""The memory that a measurement on a CPU may use."""

MEASURED = "measured.json"

MEASURING = "triptych.tuning"
"""The step of a compile, in torch's trace, in which something is measured."""

Times = tuple[float, ...]
"""Seconds of each piece of work that was timed together."""

_known: dict[str, Times] = {}


class _Questions(threading.local):
    """Of this thread: how many questions were asked, and how many of them were answered by an earlier measurement."""

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


def can_measure(device: torch.device, needed: int) -> bool:
    """May something be measured: is that allowed, is the device available with room for that many bytes, and is no CUDA
    graph being captured?"""
    if not measuring_allowed():
        return False
    if device.type == "cpu":
        return needed < HOST_BYTES
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return needed < SHARE * free


def measured(question: str, device: torch.device, prepare: Callable[[], Work]) -> float | None:
    """Seconds that a piece of work takes on a device: from memory, from disk, or measured now; None if it fails.

    `question` names everything that the answer depends on except the device and torch's version, which are added.
    """
    times = _times(device, [question], lambda: [_seconds(device, prepare)])
    return None if times is None else times[0]


def measured_in_turns(device: torch.device, *questions: tuple[str, Callable[[], Work]]) -> Times | None:
    """The same for pieces of work that are compared, each with its question; None if one fails. On a CPU their rounds
    alternate, because other load there slows what runs beside it, and their times are stored as one entry: a time is
    not compared with one that was measured at another moment."""
    if device.type == "cpu":
        names, prepare = zip(*questions)
        return _times(device, names, lambda: seconds_in_turns([p() for p in prepare]))
    times = [measured(question, device, prepare) for question, prepare in questions]
    known = tuple(time for time in times if time is not None)
    return known if len(known) == len(times) else None


def _times(device: torch.device, names: Sequence[str], measure: Callable[[], Sequence[float]]) -> Times | None:
    """The answers to questions that are asked together."""
    key = f"{_name(device)} | torch {torch.__version__} | {' / '.join(names)}"
    questions.asked += len(names)
    if len(_known.get(key, ())) != len(names):
        for stored, times in _read().items():
            _known.setdefault(stored, times)  # what this process has used once, it goes on using
    if len(_known.get(key, ())) == len(names):
        questions.answered += len(names)
    else:
        try:
            with _private.dynamo_timed(MEASURING), apart_from_the_program(device):
                _known[key] = tuple(measure())
        except Exception as error:  # no memory after all, no such kernel, or one that Triton does not compile
            log.info("not measured: %s: %s", names[0], error)
            return None
        add_to_store(MEASURED, key, _known[key])
    return _known[key]


def _seconds(device: torch.device, prepare: Callable[[], Work]) -> float:
    if device.type == "cpu":
        return seconds_on_cpu(prepare())
    with torch.cuda.device(device):
        return seconds(prepare())


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


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        onednn = "" if torch.backends.mkldnn.enabled else " without oneDNN"
        return f"{_processor()} x {torch.get_num_threads()}{onednn}"
    return torch.cuda.get_device_name(device)


def _read() -> dict[str, Times]:
    """The times on disk. Anything that cannot be a time is measured again."""
    entries = {key: value if isinstance(value, list) else [value] for key, value in read_store(MEASURED).items()}
    return {key: tuple(map(float, times)) for key, times in entries.items() if all(map(_is_time, times))}


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
