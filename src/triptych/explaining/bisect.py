"""Which rewrite is at fault: a search over the number of rewrites, in a logarithmic number of compiles."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..arguments import (
    hint_to_unpack,
    require_callable,
    require_file,
    require_keywords,
    require_model,
    require_switches,
    require_tolerance,
)
from ..errors import TriptychError
from ..options import Options
from ..passes.culprit import Rewrite, first_bad, last_rewrite
from ..passes.record import PassRecord
from ..passes.rewrite_limit import LIMIT, REPORT
from .replay import Failure, Subject, options_for_checks

EQUAL, NOT_OURS, AT_FAULT, CHANGING = "equal", "without rewrites too", "rewrite at fault", "not the same twice"

SUGGESTIONS = """\
The rewrites are not at fault. What is left:
  options={"codegen": "eager"}   if that is right, the code generator is at fault
  backend="aot_eager_decomp_partition"   if that is wrong, one of torch's decompositions is"""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """One compile with a limited number of rewrites."""

    limit: int | None
    failure: Failure | None
    passes: list[Step]
    """The passes that rewrote something."""

    @property
    def rewrites(self) -> int:
        return sum(step.record.rewrites for step in self.passes)

    def step_of(self, number: int) -> Step | None:
        """The pass that made the rewrite of that number."""
        for step in self.passes:
            if step.record.ordinal < number <= step.record.ordinal + step.record.rewrites:
                return step
        return None


@dataclass(frozen=True)
class Step:
    """A pass that rewrote something, and the graph before and after it."""

    record: PassRecord
    before: str
    after: str


class Check(Protocol):
    """Compiles with at most `limit` rewrites (None: any number) and says whether the result is good."""

    def __call__(self, limit: int | None) -> Attempt: ...


@dataclass
class Bisection:
    """What a search found."""

    verdict: str
    rewrites: int = 0
    """How many rewrites there are with no limit."""
    compiles: int = 0
    failure: Failure | None = None
    rewrite: Rewrite | None = None
    repro: Path | None = None
    repro_size: int = 0
    """How many operations the reproduction has."""
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        return self.rewrite is not None

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"verdict": self.verdict, "rewrites": self.rewrites, "compiles": self.compiles}
        data["failure"] = None if self.failure is None else {"kind": self.failure.kind, "message": str(self.failure)}
        data["repro"] = None if self.repro is None else str(self.repro)
        data["notes"] = self.notes
        if (rewrite := self.rewrite) is not None:
            data["rewrite"] = {
                "number": rewrite.number, "stage": rewrite.stage, "graph": rewrite.graph, "pass": rewrite.pass_name,
                "rule": rewrite.rule, "node": rewrite.node, "source": rewrite.source, "changes": rewrite.changes,
            }  # fmt: skip
        return data

    def __str__(self) -> str:
        lines = []
        if self.verdict == EQUAL:
            several = f"all {self.rewrites} rewrites together give" if self.rewrites > 1 else "the one rewrite gives"
            agree = f"{several} what eager gives" if self.rewrites else "nothing was rewritten"
            lines.append(f"no difference: {agree}")
        elif self.verdict == NOT_OURS:
            lines += ["differs from eager even with no rewrites", f"  {self.failure}", SUGGESTIONS]
        elif self.verdict == CHANGING:
            lines.append("the check does not give the same answer twice: make it deterministic")
        if (rewrite := self.rewrite) is not None:
            lines += [
                f"rewrite {rewrite.number} of {self.rewrites} is at fault",
                f"  pass    {rewrite.pass_name} ({rewrite.stage}, graph {rewrite.graph})",
                f"  rule    {rewrite.rule}",
                f"  at      {rewrite.node}" + (f"  # {rewrite.source}" if rewrite.source else ""),
                textwrap.indent("\n".join(rewrite.changes), "    "),
                f"  then    {self.failure}",
            ]
        lines.append(f"{self.compiles} compile{'s' * (self.compiles != 1)}")
        lines += [f"note: {note}" for note in self.notes]
        if self.repro is not None:
            lines.append(f"reproduction: {self.repro}, {self.repro_size} operation{'s' * (self.repro_size != 1)}")
        return "\n".join(lines)


def bisect(
    model: Callable[..., Any],
    *args: Any,
    train: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | Options | None = None,
    check: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    repro: str | os.PathLike[str] | None = None,
    tell: Tell = lambda message: None,
    **kwargs: Any,
) -> Bisection:
    """Find the rewrite that makes the compiled model differ from eager, or that makes the compile fail.

    A run counts as bad if it raises, or if its outputs, mutated inputs and buffers or, with `train`, its gradients
    differ from eager's by more than rounding explains, which a run in float64 shows. A relative `tolerance` replaces
    that criterion. All runs start from one seed and, unless the options say otherwise, use eager's random stream.
    `check(compiled_model)` may decide instead: it returns whether the model is good, and may raise. A program that
    shows the fault is written to `repro`. `tell` is called with messages about the progress.
    """
    require_model(model, "bisect")
    if check is not None:
        require_callable(check, "bisect", "as check a function of the compiled model")
    require_switches("bisect", train=train, dynamic=dynamic)
    require_tolerance(tolerance, "bisect")
    require_callable(tell, "bisect", "as tell a function of a message")
    if repro is not None:
        require_file(repro)
    require_keywords(bisect, model, kwargs)
    checked_options = options_for_checks(options)
    with hint_to_unpack(model, args):
        subject = Subject(model, args, kwargs, train=train, dynamic=dynamic, tolerance=tolerance, verdict=check)
    bisection = search(lambda limit: _attempt(subject, checked_options, limit), tell)
    if bisection.verdict == NOT_OURS:
        _try_other_options(subject, checked_options, bisection, tell)
    if repro is not None and bisection.verdict in (AT_FAULT, NOT_OURS):
        tell("making the program smaller")
        _write_repro(subject, checked_options, bisection, Path(repro), tell)
    return bisection


def _try_other_options(subject: Subject, options: Options, bisection: Bisection, tell: Tell) -> None:
    """If no rewrite is at fault: note which option makes the difference."""
    simpler: dict[str, Any] = {"codegen": "eager", "fallback_random": True, "freeze": False, "mode": None}
    for name, value in simpler.items():
        if getattr(options, name) == value:
            continue
        tell(f"compiling without rewrites, with {name}={value!r}")
        bisection.compiles += 1
        failure, _ = subject.check(replace(options, **{name: value}), 0)
        if failure is None:
            bisection.notes.append(f"differs with {name}={getattr(options, name)!r}, and not with {name}={value!r}")


def _write_repro(subject: Subject, options: Options, bisection: Bisection, path: Path, tell: Tell) -> None:
    from .reduce import Symptom, smallest_repro

    assert bisection.failure is not None
    symptom = Symptom(bisection.failure.kind, bisection.rewrite.rule if bisection.rewrite is not None else "")
    if bisection.failure.kind == "check":  # the check may not apply to a smaller program
        bisection.notes.append("with a check of your own no reproduction is written")
        return
    message = str(replace(bisection, repro=None))
    written = smallest_repro(subject, options, symptom, path, bisection.rewrite, message, tell=tell)
    bisection.repro, bisection.repro_size = written.path, written.size
    bisection.notes += [written.note] if written.note else []


def bisect_command(command: str, tell: Tell = lambda message: None, timeout: float | None = None) -> Bisection:
    """The same for a command whose exit code is 0 if all is well; the limit is passed in its environment."""
    return search(lambda limit: _attempt_command(command, limit, timeout), tell)


def search(check: Check, tell: Tell = lambda message: None) -> Bisection:
    """Compiles with all rewrites, with none, then by halving their number: at most log2(n) + 4 compiles."""
    attempts: dict[int, Attempt] = {}

    def attempt(limit: int | None) -> Attempt:
        bisection.compiles += 1
        result = check(limit)
        if limit is not None:
            attempts[limit] = result
        return result

    def is_bad(limit: int) -> bool:
        tell(f"{bisection.compiles} compiles so far, trying {limit} of {bisection.rewrites} rewrites")
        return attempt(limit).failure is not None

    bisection = Bisection(EQUAL)
    tell("compiling with all rewrites")
    everything = attempt(None)
    bisection.rewrites, bisection.failure = everything.rewrites, everything.failure
    if everything.failure is None:
        return bisection
    tell("compiling without rewrites")
    nothing = attempt(0)
    if nothing.failure is not None:
        bisection.verdict, bisection.failure = NOT_OURS, nothing.failure
        return bisection
    # a failing compile may end before its last rewrite, but one of the rewrites that it made is at fault
    if not everything.rewrites:
        bisection.verdict = CHANGING
        return bisection
    number = first_bad(is_bad, everything.rewrites)
    for limit in (number, number - 1):
        if limit not in attempts:
            is_bad(limit)
    return _conclude(bisection, number, attempts[number], attempts[number - 1])


def _conclude(bisection: Bisection, number: int, bad: Attempt, good: Attempt) -> Bisection:
    step = bad.step_of(number)
    if step is None or bad.failure is None or good.failure is not None:
        bisection.verdict = CHANGING
        return bisection
    earlier = good.step_of(number - 1)
    same = earlier is not None and earlier.record.ordinal == step.record.ordinal
    fired = earlier.record.fired if earlier is not None and same else Counter[str]()
    before = earlier.after if earlier is not None and same else step.before
    bisection.verdict, bisection.failure = AT_FAULT, bad.failure
    bisection.rewrite = replace(last_rewrite(step.record, fired, before, step.after), number=number)
    return bisection


# ---- a model ----


def _attempt(subject: Subject, options: Options, limit: int | None) -> Attempt:
    failure, sessions = subject.check(options, limit)
    if limit is None and failure is None and not sessions:
        raise TriptychError("nothing was compiled: Dynamo found no tensor operation in this call")
    records = [record for session in sessions for record in session.records if record.rewrites and not record.required]
    records.sort(key=lambda record: record.ordinal)
    # listings are rebuilt from deltas on access, so only those of the last pass are read
    last = records[-1] if records else None
    texts = {id(last): (last.before, last.after)} if last is not None else {}
    steps = [Step(record, *texts.get(id(record), ("", ""))) for record in records]
    return Attempt(limit, failure, steps)


# ---- a command ----


def _attempt_command(command: str, limit: int | None, timeout: float | None) -> Attempt:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rewrites.jsonl"
        environment = {**os.environ, REPORT: str(report)}
        if limit is not None:
            environment[LIMIT] = str(limit)
        try:
            process = subprocess.run(
                command, shell=True, env=environment, timeout=timeout, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            failure: Failure | None = Failure("command", f"it ran for more than {timeout:g} s")
        else:
            if process.returncode in (126, 127):
                raise TriptychError(f"the check cannot be run: {process.stderr.strip() or command}")
            output = (process.stderr or process.stdout).strip().splitlines()
            detail = f": {output[-1]}" if output else ""
            failure = Failure("command", f"exit code {process.returncode}{detail}") if process.returncode else None
        lines = report.read_text("utf-8").splitlines() if report.exists() else []
    steps = _reported(lines)
    if limit is None and not lines:
        outcome = "passes" if failure is None else f"fails ({failure})"
        raise TriptychError(f"the check {outcome}, but it compiled nothing with Triptych: there is nothing to bisect")
    if limit is None and failure is not None and not steps:
        raise TriptychError(f"the check fails ({failure}), and no pass of triptych rewrote anything in it")
    return Attempt(limit, failure, steps)


def _reported(lines: Sequence[str]) -> list[Step]:
    """The steps of the process that reported most of them. Lines are only data: each field is converted to its type."""
    by_process: dict[Any, list[Step]] = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            data = json.loads(line)
            record = PassRecord(str(data["stage"]), str(data["pass"]), str(data["graph"]))
            record.ordinal, record.rewrites = int(data["ordinal"]), int(data["rewrites"])
            record.fired = Counter({str(name): int(count) for name, count in data["fired"].items()})
            step = Step(record, str(data.get("before", "")), str(data.get("after", "")))
            by_process.setdefault(data["process"], []).append(step)
    return max(by_process.values(), key=len, default=[])
