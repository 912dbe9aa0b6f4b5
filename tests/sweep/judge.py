"""One program, eager and compiled: is the result the same, and if it is not, does torch alone do better?"""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import triptych
from tests import compare
from tests.models import Call
from triptych import _private
from triptych.errors import VerificationError
from triptych.passes.session import Session, watching
from triptych.verify import numerics
from triptych.verify.running import Result

from .databases import copied
from .programs import ERROR, Program

EQUAL, REFUSED, WRONG, CRASHED, SKIPPED = "equal", "refused", "wrong", "crashed", "skipped"

BASELINES = {"eager": "aot_eager", "inductor": "inductor"}
"""What torch itself does in the place of each of our code generators."""

WIDER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
         torch.complex64: torch.complex128}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    status: str
    detail: str = ""
    captured: bool = True
    """False where Dynamo left the whole program to eager, so that nothing of ours ran."""


class Raised(Exception):
    """The program raised; `__cause__` says what."""


def judge(program: Program, codegen: str) -> Verdict:
    """Compile and compare one program. Never raises for what the program or a compiler does."""
    with _quiet(), _settings(program):
        try:
            want, train = _eager(program)
        except Raised as error:
            if program.form != ERROR:
                return Verdict(SKIPPED, f"eager: {_cause(error)}")
            return _judge_error(program, codegen)
        if program.form == ERROR:
            return Verdict(SKIPPED, "eager does not refuse this call here")
        return _judge_result(program, codegen, want, train)


def _judge_result(program: Program, codegen: str, want: compare.Outcome, train: bool) -> Verdict:
    with watching() as sessions:
        try:
            got = _compiled(program, _backend(codegen), train)
            problem = _difference(program, want, got, train)
            status = WRONG
        except Raised as error:
            problem, status = _cause(error), CRASHED
    if problem is None:
        if failures := _failures(sessions):
            return Verdict(CRASHED, f"inside a pass: {failures[0]}")
        return Verdict(EQUAL, captured=bool(sessions))
    if refusal := _refusal(program, BASELINES[codegen], want, train):
        return Verdict(REFUSED, f"{problem} | {BASELINES[codegen]}: {refusal}")
    return Verdict(status, problem)


def _judge_error(program: Program, codegen: str) -> Verdict:
    """Eager raises: so must the compiled program, unless torch's own compilers return too."""
    with watching() as sessions:
        try:
            _compiled(program, _backend(codegen), train=False)
        except Raised:
            if failures := _failures(sessions):
                return Verdict(CRASHED, f"inside a pass: {failures[0]}")
            return Verdict(EQUAL, captured=bool(sessions))
    with contextlib.suppress(Raised):
        _compiled(program, BASELINES[codegen], train=False)
        return Verdict(REFUSED, "returns where eager raises, with torch's own compiler too")
    return Verdict(WRONG, "returns where eager raises")


def _refusal(program: Program, backend: str, want: compare.Outcome, train: bool) -> str | None:
    """How torch's own compiler fails on this program; None if it gets it right."""
    try:
        return _difference(program, want, _compiled(program, backend, train), train)
    except Raised as error:
        return _cause(error)


# ---- running ----


def _eager(program: Program) -> tuple[compare.Outcome, bool]:
    """What eager gives, and whether it has a gradient to compare."""
    if program.train:
        try:
            return _observe(program, lambda f: f, train=True), True
        except Raised as error:
            if not isinstance(error.__cause__, AssertionError):  # nothing that has a gradient comes out
                raise
    return _observe(program, lambda f: f, train=False), False


def _compiled(program: Program, backend: Any, train: bool) -> compare.Outcome:
    torch._dynamo.reset()
    options = {} if isinstance(backend, str) else {"options": backend[1]}
    backend = backend if isinstance(backend, str) else backend[0]
    return _observe(program, lambda f: torch.compile(f, backend=backend, dynamic=program.dynamic, **options), train)


def _backend(codegen: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    # with eager's random stream, values of random operators can be compared too
    return triptych.compile_fx, {"codegen": codegen, "fallback_random": True, "on_error": "raise"}


def _observe(program: Program, prepare: Callable[[Any], Any], train: bool, wide: bool = False) -> compare.Outcome:
    function, call = _fresh(program, wide)
    context = contextlib.nullcontext() if program.train else torch.no_grad()
    try:
        with context:
            outcome = compare.observe(prepare(function), call, train=train)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # some of torch's errors derive from BaseException
        raise Raised from error
    return outcome


def _fresh(program: Program, wide: bool) -> tuple[Any, Call]:
    inner = program.function.function
    if isinstance(inner, nn.Module):
        inner = copy.deepcopy(inner)
        inner = inner.double() if wide else inner
    call = copied(program.call)
    return type(program.function)(inner), _widened(call) if wide else call


def _widened(value: Any) -> Any:
    """The same call in float64: the measure of rounding errors."""
    if isinstance(value, Call):
        return Call(_widened(value.args), _widened(value.kwargs))
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in WIDER:
        return value.detach().to(WIDER[value.dtype]).requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)([_widened(v) for v in value])
    if isinstance(value, dict):
        return {_widened(k): _widened(v) for k, v in value.items()}
    return value


# ---- comparing ----


def _difference(program: Program, want: compare.Outcome, got: compare.Outcome, train: bool) -> str | None:
    found = compare.differences(want, got)
    metadata = [line for line in found if ": value " not in line]
    if metadata or not found:
        return metadata[0] if metadata else None
    if not program.operator.initialised or _draws(program, want, train):
        return None
    try:
        exact = _result(_observe(program, lambda f: f, train, wide=True))
    except Raised:
        exact = None
    try:
        with warnings.catch_warnings():
            numerics.compare(_result(want), _result(got), exact, from_floats=False)
    except VerificationError as error:
        return f"{found[0]} ({error})"
    except (RuntimeError, NotImplementedError, TypeError):
        return found[0]  # a layout that the finer comparison does not read
    return None


def _result(outcome: compare.Outcome) -> Result:
    def detached(tensors: dict[str, Any]) -> dict[str, Any]:
        return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}

    written = {**outcome.inputs, **outcome.state}
    return Result(detached(outcome.outputs), detached(written), detached(outcome.gradients))


def _draws(program: Program, want: compare.Outcome, train: bool) -> bool:
    """Does eager itself give something else from another seed?"""

    def reseeded(function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.manual_seed(5)
            return function(*args, **kwargs)

        return call

    try:
        again = _observe(program, reseeded, train)
    except Raised:
        return False
    return any(": value " in line for line in compare.differences(want, again) if line.startswith("output"))


# ---- surroundings ----


def _failures(sessions: list[Session]) -> list[str]:
    """Errors that a compile survived: a rule or pass that raised."""
    errors = [f"{r.stage} {r.name}: {r.error.strip().splitlines()[-1]}" for s in sessions for r in s.records if r.error]
    return errors or [w for s in sessions for w in s.warnings if "raised" in w]


@contextlib.contextmanager
def _settings(program: Program) -> Iterator[None]:
    with (
        _private.unlimited_recompiles(),
        # with dynamic sizes, results whose size depends on data are captured as well
        _private.dynamo_config.patch(
            capture_scalar_outputs=program.dynamic, capture_dynamic_output_shape_ops=program.dynamic
        ),
        _private.functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cause(error: Raised) -> str:
    cause = error.__cause__
    inner = getattr(cause, "inner_exception", None) or cause
    text = re.sub(r"\s+", " ", str(inner)).strip()
    ours = [f for f in traceback.extract_tb(inner.__traceback__) if "/triptych/" in f.filename]
    place = f" [{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}]" if ours else ""
    return f"{type(inner).__name__}{place}: {text[:300]}"
