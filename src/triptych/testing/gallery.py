"""The gallery: every pass alone on one of its examples, measured, and compared with eager.

No result in it is stored: the examples run when the gallery is made.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from .. import _private
from ..passes.catalogue import PassInfo
from ..passes.effects import effect_of
from ..pipeline import STAGES, Hook
from ..rewrite.driver import Tally
from ..rewrite.examples import Example, make_inputs
from ..rewrite.passes import Pass
from ..rewrite.rule import Rule
from .capture import capture, runnable
from .check import apply_example, compare_gradients, compare_graphs

EQUAL, CLOSE, DIFFERS = "equal", "close", "DIFFERS"
NOTHING = "none"
"""No output has a gradient with respect to an input."""
AFTERWARDS = "-"
"""The stage comes after autograd: its graphs contain the operations of the backward."""
OTHER_DRAWS = "other draws"
"""Random numbers from another stream: shapes, dtypes and strides are equal."""
TRIED = 5
"""How many examples are tried for one that has a gradient and a smaller graph to show."""


@dataclass(frozen=True)
class Exhibit:
    """One pass on one of its examples."""

    example: str = ""
    """What the program computes, on one line."""
    rewrites: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    forward: str = ""
    """`equal` bit for bit, `close` up to rounding as the pass says, or `DIFFERS`."""
    gradient: str = ""
    problem: str = ""

    @property
    def good(self) -> bool:
        return self.rewrites > 0 and DIFFERS not in (self.forward, self.gradient)

    @property
    def rank(self) -> tuple[bool, bool]:
        """How instructive the exhibit is: does it have a gradient, and a smaller graph?"""
        return self.gradient in (EQUAL, AFTERWARDS), self.nodes_after < self.nodes_before


def gallery(infos: Sequence[PassInfo]) -> Iterator[Exhibit | None]:
    """Yields an exhibit for each pass, made when it is asked for; None for the hooks of the user's own passes."""
    made: dict[tuple[str, str], Exhibit | None] = {}
    for info in infos:
        key = info.stage, info.name
        if key not in made:
            made[key] = _exhibit_of(info)
        yield made[key]


def _exhibit_of(info: PassInfo) -> Exhibit | None:
    for entry in STAGES[info.stage]:
        if isinstance(entry, Hook):
            continue
        if entry.name == info.name:
            return exhibit(entry, info.stage)
        if info.name in entry.parts:
            return exhibit_of_part(entry, info.name, info.stage)
    return None


def exhibit_of_part(subject: type[Pass], part: str, stage: str) -> Exhibit:
    """A pass of which only one part runs, on the example of that part."""
    return _show(subject, subject.part_examples[part], stage)


def exhibit(subject: type[Pass], stage: str) -> Exhibit:
    """The pass on the first of its examples that has a gradient and a smaller graph; if there is none, on the example
    that comes nearest to that."""
    best: Exhibit | None = None
    for example in firing_examples(subject)[:TRIED]:
        shown = _show(subject, example, stage)
        if not shown.good or shown.rank == (True, True):
            return shown
        if best is None or shown.rank > best.rank:
            best = shown
    return best or Exhibit()


def firing_examples(subject: type[Pass]) -> list[Example]:
    """The firing examples of the pass, then those of its rules. Examples at the torch level come first, and those of
    rules that only prepare the graph for another rule of the pass last."""
    rules = sorted(subject().rules(), key=lambda rule: not effect_of(subject.name, rule.name).matters)
    carried = [*subject.examples, *(e for rule in rules for e in rule.examples)]
    return sorted((e for e in carried if e.fires), key=lambda e: "torch" not in e.dialects)


def one_line(source: str) -> str:
    """The body of a lambda or a function on one line, without its docstring."""
    try:
        (program,) = ast.parse(source).body
    except (SyntaxError, ValueError):  # a module as it prints itself
        return " ".join(source.split())
    if isinstance(program, ast.Expr) and isinstance(program.value, ast.Lambda):
        return ast.unparse(program.value.body)
    if not isinstance(program, ast.FunctionDef):
        return " ".join(source.split())
    body = program.body[1:] if ast.get_docstring(program) and len(program.body) > 1 else program.body
    return "; ".join(" ".join(ast.unparse(statement).split()) for statement in body)


@dataclass
class _Run:
    """A pass applied to the graphs of one program, as they are captured."""

    subject: type[Pass]
    example: Example
    tally: Tally | None = None
    before: int = 0
    after: int = 0

    def apply(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.example.prepare is not None:
            self.example.prepare(gm.graph)
        self.before = len(gm.graph.nodes)
        self.tally = apply_example(self._carrier(), gm, self.example)
        self.after = len(gm.graph.nodes)
        gm.recompile()
        return gm


    def _carrier(self) -> Rule | type[Pass]:
        """The pass; or the rule alone, if the example has settings for that rule."""
        if not self.example.settings:
            return self.subject
        of_parts = [r for part, e in self.subject.part_examples.items() if e is self.example
                    for r in self.subject.rules_of_part(part)]  # fmt: skip
        own = [rule for rule in self.subject().rules() if any(e is self.example for e in rule.examples)]
        return next(iter((*own, *of_parts)), self.subject)


def _show(subject: type[Pass], example: Example, stage: str) -> Exhibit:
    source = one_line(example.source)
    run = _Run(subject, example)
    with contextlib.redirect_stderr(io.StringIO()), _private.unlimited_recompiles():
        inputs, eager, rewritten = _programs(run, stage)
        try:
            forward = _forward(run, eager, rewritten, inputs)
        except AssertionError as error:
            return Exhibit(source, forward=DIFFERS, problem=str(error))
        assert run.tally is not None
        shown = Exhibit(source, run.tally.fired.total(), run.before, run.after, forward)
        try:
            return replace(shown, gradient=_gradient(run, eager, rewritten, inputs, stage))
        except AssertionError as error:
            return replace(shown, gradient=DIFFERS, problem=str(error))


def _programs(run: _Run, stage: str) -> tuple[list[Any], Callable[..., Any], Callable[..., Any]]:
    """The inputs, the program in eager, and the program as the pass leaves it."""
    example = run.example
    inputs = make_inputs(example)
    if "torch" in example.dialects and stage == "pre_grad":
        # captured anew when gradients are asked for, as Dynamo does it for a user
        compiled = torch.compile(example.program, backend=run.apply, fullgraph=True, dynamic=example.dynamic)
        return inputs, example.program, compiled
    dialect = "aten" if "aten" in example.dialects else example.dialects[0]
    gm, inputs = capture(example.program, inputs, dialect, example.dynamic)
    eager = copy.deepcopy(gm)
    run.apply(gm, inputs)
    return inputs, runnable(eager), runnable(gm)


def _forward(run: _Run, eager: Callable[..., Any], rewritten: Callable[..., Any], inputs: Sequence[Any]) -> str:
    if not run.example.same_values:
        compare_graphs(eager, rewritten, inputs, values=False)
        return OTHER_DRAWS
    try:
        compare_graphs(eager, rewritten, inputs)
        return EQUAL
    except AssertionError:
        if _says_exact(run):
            raise
    compare_graphs(eager, rewritten, inputs, exact=False)
    return CLOSE


def _says_exact(run: _Run) -> bool:
    fired = run.tally.fired if run.tally is not None else {}
    return run.subject.exact and all(
        rule.exact for rule in run.subject().rules() if any(map(rule.counts_as, fired))
    )


def _gradient(
    run: _Run, eager: Callable[..., Any], rewritten: Callable[..., Any], inputs: Sequence[Any], stage: str
) -> str:
    if stage != "pre_grad":
        return AFTERWARDS
    if not run.example.same_values or not compare_gradients(eager, rewritten, inputs):
        return NOTHING
    # with gradients wanted the pass may have left the program alone: then nothing was shown
    return EQUAL if run.tally is not None and run.tally.fired else NOTHING
