"""Times each kernel launch of compiled code, by notes taken before and after it in the code that launches it.

The code is compiled again with these notes in it, and put into the functions that callers have already; at the end the
functions have their own code again. Generated code has a line for each launch, and the code of a graph that runs node
by node has one for each node, so that every launch is attributed to what it computes.
"""

from __future__ import annotations

import ast
import contextlib
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from .. import _private
from ..passes.session import Session
from .kernels import kernel_calls
from .launches import Launch, is_call, launches, node_launches

BEGIN, END = "_triptych_launch_begins", "_triptych_launch_ends"
RANGE = "triptych launch "
"""The names of a profiler's ranges, followed by the number of a launch."""

Key = tuple[int, Launch]
"""The number of the program, from 1, and a launch."""
Event = tuple[int, float, float]
"""The number of a launch in the list of all launches; when it began and ended, in seconds."""


class Probe:
    """What notes are written to: one after the other, on the thread that runs the program."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.events: list[Event] = []
        self.with_ranges = False
        """Also open a range of torch's profiler, to which it adds what the GPU does."""
        self._open: list[tuple[int, float, Any]] = []

    def begin(self, number: int) -> None:
        shown = None
        if self.with_ranges:
            shown = torch.profiler.record_function(f"{RANGE}{number}")
            shown.__enter__()
        self._open.append((number, self.clock(), shown))

    def end(self) -> None:
        ended = self.clock()
        number, began, shown = self._open.pop()
        if shown is not None:
            shown.__exit__(None, None, None)
        self.events.append((number, began, ended))

    def taken(self) -> list[Event]:
        """The events since this was last asked."""
        events, self.events = self.events, []
        self._open.clear()
        return events


@dataclass(frozen=True)
class _Swap:
    """A function, and its code with notes."""

    function: types.FunctionType
    code: types.CodeType


class Probed:
    """The compiled code of some programs, each of whose launches can be timed."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.launches: list[Key] = []
        self.probe = Probe()
        self._swaps: list[_Swap] = []
        for program, session in enumerate(sessions, 1):
            for graph in list(session.kernels):
                self._generated(program, session, graph)
            for graph, gm in list(session.runnable.items()):
                if graph not in session.kernels:
                    self._node_by_node(program, session, graph, gm)

    @contextlib.contextmanager
    def noting(self) -> Iterator[Probe]:
        """Inside, the code writes notes."""
        codes = [swap.function.__code__ for swap in self._swaps]
        spaces = [swap.function.__globals__ for swap in self._swaps]
        for space in spaces:
            space.update({BEGIN: self.probe.begin, END: self.probe.end})
        for swap in self._swaps:
            swap.function.__code__ = swap.code
        try:
            yield self.probe
        finally:
            for swap, code in zip(self._swaps, codes):
                swap.function.__code__ = code
            for space in spaces:
                space.pop(BEGIN, None)
                space.pop(END, None)

    def _generated(self, program: int, session: Session, graph: str) -> None:
        source = session.kernels[graph]
        first = len(self.launches)
        self.launches += [(program, launch) for launch in launches(session, graph)]
        numbers = {call.line: first + number for number, call in enumerate(kernel_calls(source))}
        definitions = _definitions(source, lambda statement: numbers.get(statement.lineno))
        for module in modules_of(source):
            for name, code in definitions.items():
                if (function := _function_of(module, name)) is not None:
                    self._add(function, code)

    def _node_by_node(self, program: int, session: Session, graph: str, gm: GraphModule) -> None:
        first = len(self.launches)
        self.launches += [(program, launch) for launch in node_launches(session, graph, gm)]
        names = [node.name for node in gm.graph.nodes if is_call(node)]
        numbers = {name: first + number for number, name in enumerate(names)}
        definitions = _definitions(gm.code, lambda statement: numbers.get(_target(statement)))
        if "forward" in definitions:
            self._add(type(gm).forward, definitions["forward"])

    def _add(self, function: Any, code: types.CodeType) -> None:
        if len(function.__code__.co_freevars) == len(code.co_freevars):
            self._swaps.append(_Swap(function, code))


def modules_of(source: str) -> list[types.ModuleType]:
    """The loaded modules of generated code whose source this is."""
    result = []
    for module in reversed(_private.PyCodeCache.modules):
        with contextlib.suppress(OSError):
            if module not in result and Path(str(module.__file__)).read_text(encoding="utf-8") == source:
                result.append(module)
    return result


def _function_of(module: types.ModuleType, name: str) -> Any:
    """A function of a generated module, or a method of the object that runs its graph."""
    runner = vars(module).get("Runner")
    function = vars(runner).get(name) if runner is not None else None
    function = function or vars(module).get(name)
    return getattr(function, "__func__", function)


def _definitions(source: str, number_of: Callable[[ast.stmt], int | None]) -> Mapping[str, types.CodeType]:
    """The functions of a source that launch kernels, compiled with notes."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # C++ that launches the kernels itself
        return {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    result: dict[str, types.CodeType] = {}
    for function in functions:
        notes = _Notes(number_of)
        noted = notes.visit(function)
        if notes.count:
            module = compile(ast.fix_missing_locations(ast.Module([noted], [])), "<code with notes>", "exec")
            codes = (code for code in module.co_consts if isinstance(code, types.CodeType))
            result[function.name] = next(code for code in codes if code.co_name == function.name)
    return result


class _Notes(ast.NodeTransformer):
    """Writes a call before and after every statement that launches something."""

    def __init__(self, number_of: Callable[[ast.stmt], int | None]) -> None:
        self.number_of = number_of
        self.count = 0

    def _visit_statement(self, statement: ast.stmt) -> Any:
        number = self.number_of(statement)
        if number is None:
            return statement
        self.count += 1
        begins = ast.parse(f"{BEGIN}({number})").body
        ends = ast.parse(f"{END}()").body
        return [*begins, statement, *ends]

    def visit_Assign(self, node: ast.Assign) -> Any:
        return self._visit_statement(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return self._visit_statement(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return self._visit_statement(node)


def _target(statement: ast.stmt) -> str:
    """The name that a statement assigns the result of a call; values that are no longer needed are set to None."""
    if isinstance(getattr(statement, "value", None), ast.Constant):
        return ""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return target.id if isinstance(target, ast.Name) else ""
