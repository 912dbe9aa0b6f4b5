"""Measures what the model of a device cannot predict, once per question; answers are cached in memory and on disk."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import math
import platform
from collections.abc import Callable
from pathlib import Path

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

_known: dict[str, float] = {}


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
    key = _key(question, device)
    if key not in _known:
        _known.update(_read())
    if key not in _known:
        try:
            with apart_from_the_program(device):
                _known[key] = _seconds(device, prepare)
        except Exception as error:  # no memory after all, no such kernel, or one that Triton does not compile
            log.info("not measured: %s: %s", question, error)
            return None
        add_to_store(MEASURED, key, _known[key])
    return _known[key]


def measured_in_turns(device: torch.device, *questions: tuple[str, Callable[[], Work]]) -> tuple[float, ...] | None:
    """The same for pieces of work that are compared, each with its question; None if one fails. On a CPU their rounds
    alternate, because other load there slows what runs beside it, and all are timed if the time of one is not known."""
    keys = [_key(question, device) for question, _ in questions]
    if device.type != "cpu" or all(key in _known for key in keys):
        times = [measured(question, device, prepare) for question, prepare in questions]
        known = tuple(time for time in times if time is not None)
        return known if len(known) == len(times) else None
    _known.update(_read())
    if not all(key in _known for key in keys):
        try:
            with apart_from_the_program(device):
                answers = seconds_in_turns([prepare() for _, prepare in questions])
        except Exception as error:  # no memory after all, or no such kernel
            log.info("not measured: %s: %s", questions[0][0], error)
            return None
        for key, answer in zip(keys, answers):
            _known[key] = answer
            add_to_store(MEASURED, key, answer)
    return tuple(_known[key] for key in keys)


def _key(question: str, device: torch.device) -> str:
    return f"{_name(device)} | torch {torch.__version__} | {question}"


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
        return f"{_processor()} x {torch.get_num_threads()}"
    return torch.cuda.get_device_name(device)


def _read() -> dict[str, float]:
    """The times on disk. Anything that cannot be a time is measured again."""
    times = {k: v for k, v in read_store(MEASURED).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {k: float(v) for k, v in times.items() if 0 < v < math.inf}
