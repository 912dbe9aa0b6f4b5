"""Runs a program eagerly and compiled, and says what is different, and whose fault that is."""

from __future__ import annotations

import contextlib
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.compare import Outcome, differences
from triptych.passes.session import Session, watching

from .noise import Noise
from .program import Program
from .routes import compiled, compiled_by_torch

EQUAL, INVALID, UNSTABLE, TORCH = "equal", "invalid", "unstable", "torch"
WRONG, RAISES, FAILED_PASS, SLOW = "wrong", "raises", "failed pass", "slow"
FAULTS = (WRONG, RAISES, FAILED_PASS, SLOW)
SECONDS = 120
"""More of this process's own time than a compile of a few statements ever takes. The C++ compiler runs in other processes,
and how long that takes says more about the machine."""
SECONDS_OF_WAITING = 900
"""For a program that waits for something that never comes."""


@dataclass(frozen=True)
class Verdict:
    kind: str
    lines: tuple[str, ...] = ()
    """What is different, or what was raised."""
    fired: Counter[str] = field(default_factory=Counter, compare=False)
    """How often each rule rewrote something."""

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS

    @property
    def signature(self) -> frozenset[str]:
        """The kinds of differences, without names and numbers: two programs with the same fault have the same."""
        if self.kind == WRONG:
            return frozenset(_kind_of(line) for line in self.lines)
        return frozenset({re.sub(r"[\d.]+|'[^']*'", "#", line)[:80] for line in self.lines[:1]})


def _kind_of(line: str) -> str:
    subject, _, what = line.partition(": ")
    subject = "gradient" if subject.startswith("gradient") else subject.partition(" ")[0]
    return f"{subject} {what.partition(' ')[0]}"


class TooSlow(BaseException):
    """Not an Exception: a compiler would take it for an error of its own and raise another one."""


@contextlib.contextmanager
def limited(seconds: float, waiting: float = SECONDS_OF_WAITING) -> Iterator[None]:
    """Raises TooSlow after so much time of this process, or of the clock."""

    def stop(*_: Any) -> None:
        raise TooSlow

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, waiting))
    before = [signal.signal(number, stop) for _, number, _ in timers]
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def judge(program: Program, confirm: bool = True) -> Verdict:
    """Compare with eager; with `confirm`, ask whether rounding explains a difference, and whether torch makes it too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wants = run(program, lambda function, arguments: function)
        except Exception as error:
            return Verdict(INVALID, (_first_line(error),))
        with watching() as sessions:
            verdict = compare(program, wants, lambda function, arguments: compiled(program, function, arguments))
        fired: Counter[str] = Counter()
        for session in sessions:
            for record in session.records:
                fired.update(record.fired)
        verdict = replace(_with_failed_passes(verdict, sessions), fired=fired)
        if not (verdict.is_fault and confirm):
            return verdict
        if verdict.kind == WRONG:
            verdict = _less_rounding(program, wants, verdict)
        return _less_torch(program, wants, verdict) if verdict.is_fault else verdict


def _with_failed_passes(verdict: Verdict, sessions: list[Session]) -> Verdict:
    said = tuple(dict.fromkeys(warning for session in sessions for warning in session.warnings))
    return Verdict(FAILED_PASS, said) if said and verdict.kind == EQUAL else verdict


def compare(program: Program, wants: list[Outcome], make: Callable[..., Callable[..., Any]]) -> Verdict:
    try:
        with limited(SECONDS):
            gots = run(program, make)
    except TooSlow:
        return Verdict(SLOW, (f"not finished after {SECONDS} s",))
    except Exception as error:
        return Verdict(RAISES, (f"{type(error).__name__}: {_first_line(error)}", _place(error)))
    lines = [line for want, got in zip(wants, gots) for line in differences(want, got)]
    return Verdict(WRONG, tuple(dict.fromkeys(lines))) if lines else Verdict(EQUAL)


def run(program: Program, make: Callable[..., Callable[..., Any]], calls: int = 2) -> list[Outcome]:
    """Two calls with other values, and other sizes where they are dynamic, and what each leaves behind."""
    torch._dynamo.reset()
    outcomes, function, state = [], None, {}
    for call in range(calls):
        inputs = program.inputs(call)
        if function is not None:  # parameters and buffers belong to the program: the second call sees what the first left
            inputs.update(state)
        arguments = [inputs[name] for name in program.arguments]
        with torch.set_grad_enabled(program.train):
            if function is None:
                state = {name: inputs[name] for name in program.state}
                function = make(program.function(inputs), arguments)
            outcomes.append(observe(program, function, arguments, inputs))
    return outcomes


def observe(program: Program, function: Callable[..., Any], arguments: list[Any], inputs: dict[str, Tensor]) -> Outcome:
    torch.manual_seed(1)
    leaves, structure = pytree.tree_flatten(function(*arguments))
    outcome = Outcome(
        structure=structure,
        leaves=leaves,
        outputs={f"output {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)},
        inputs={f"input {name}": inputs[name] for name in inputs},
        state={},
    )
    if program.train:
        outcome.gradients = _gradients(outcome, inputs)
    return outcome


def _gradients(outcome: Outcome, inputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """By all leaves, for random weights on everything that has a gradient."""
    generator = torch.Generator().manual_seed(2)
    # by name, not by object: which results are one object is compared apart
    every = (*outcome.outputs.values(), *outcome.inputs.values())
    roots = [t for t in every if t.requires_grad and t.grad_fn is not None]
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in roots]
    for tensor in inputs.values():
        if tensor.is_leaf:
            tensor.grad = None
    if roots:
        torch.autograd.backward(roots, weights)
    return {f"gradient of {n}": t.grad for n, t in inputs.items() if t.is_leaf and t.requires_grad}


def _less_rounding(program: Program, wants: list[Outcome], verdict: Verdict) -> Verdict:
    """Without the differences that rounding noise makes in eager too."""
    noisy: set[str] = set()
    for seed in range(3):
        try:
            with Noise(seed):
                gots = run(program, lambda function, arguments: function)
        except Exception:
            continue
        noisy |= {_subject(line) for want, got in zip(wants, gots) for line in differences(want, got)}
    lines = tuple(line for line in verdict.lines if not (": value" in line and _subject(line) in noisy))
    return replace(verdict, lines=lines) if lines else replace(verdict, kind=UNSTABLE)


def _subject(line: str) -> str:
    return line.partition(": ")[0]


def _less_torch(program: Program, wants: list[Outcome], verdict: Verdict) -> Verdict:
    """Is a backend of torch's own different from eager in the same way?"""
    if program.route == "stage" or verdict.kind == FAILED_PASS:
        return verdict
    for backend in ("aot_eager", "aot_eager_decomp_partition", *["inductor"] * (program.codegen == "inductor")):
        other = compare(program, wants, lambda f, arguments, b=backend: compiled_by_torch(program, f, arguments, b))
        same = verdict.signature <= other.signature if verdict.kind == WRONG else other.kind == RAISES
        if other.kind == verdict.kind and same:
            return replace(verdict, kind=TORCH)
    return verdict


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""


def _place(error: BaseException) -> str:
    """Where in the package it was raised, the innermost frame."""
    place, frame = "", error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if "triptych" in code.co_filename:
            place = f"{code.co_filename.rpartition('triptych/')[2]}:{frame.tb_lineno} {code.co_name}"
        frame = frame.tb_next
    return place


def check(program: Program) -> None:
    """For tests: fail with the program and every difference."""
    verdict = judge(program)
    assert verdict.kind != INVALID, f"eager does not run it: {verdict.lines}\n{program}"
    assert not verdict.is_fault, "\n".join([verdict.kind, *verdict.lines, "", str(program)])
