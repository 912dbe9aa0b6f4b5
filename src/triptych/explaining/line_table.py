"""Every line of every listing of a report, stored once. The page builds graphs, differences and histories from it."""

from __future__ import annotations

import bisect
import linecache
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..cost.estimate import FREE, OperationCost
from ..passes.node_lines import NodeLine

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
WHOLE_FILE = 800
"""A source file with at most this many lines is included whole; of a longer one, only the lines that stacks point to,
with `AROUND` lines before and after each."""
AROUND = 15

class Numbered:
    """Assigns a number to each distinct value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, value: Any = None) -> int:
        number = self._numbers.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(key if value is None else value)
        return number


class LineTable:
    """Lines by number, as columns; strings, types, stacks and rules that repeat are numbers, too."""

    def __init__(self) -> None:
        self.names = Numbered()
        self.types = Numbered()
        self.rules = Numbered()
        self.stacks = Numbered()
        self.files = Numbered()
        self.costs: list[OperationCost] = []
        self._lines = Numbered()

    def number(self, line: str, program: int, labels: Mapping[str, str]) -> int:
        known = len(self._lines.values)
        trace = getattr(line, "stack_trace", "")
        number = self._lines.number((program, str(line), trace))
        if number == known:
            cost = line.cost if isinstance(line, NodeLine) else FREE
            self._lines.values[number] = self._columns(line, trace, cost, labels)
            self.costs.append(cost)
        return number

    def total(self, numbers: Iterable[int]) -> dict[str, Any]:
        costs = [self.costs[number] for number in numbers]
        return {
            "nodes": len(costs),
            "gemms": sum(cost.gemms for cost in costs),
            "bytes": sum(cost.bytes for cost in costs),
            "seconds": sum(cost.seconds for cost in costs),
        }

    def _columns(self, line: str, trace: str, cost: OperationCost, labels: Mapping[str, str]) -> list[Any]:
        if isinstance(line, NodeLine):
            name, type_, call, inputs = line.name, line.type, line.call, line.inputs
            rule, origin, sequence = line.rule, line.origin, line.sequence
        else:  # a listing of plain strings
            name, _, call = line.partition(" = ") if " = " in line else (line, "", line)
            name, _, type_ = name.partition(": ")
            inputs, rule, origin, sequence = (), "", "", -1
        shown = IDENTIFIER.sub(lambda found: labels.get(found.group(), found.group()), call)
        return [
            self.names.number(name),
            self.types.number(type_),
            f"input {labels[name]}" if call == "input" and name in labels else shown,
            [self.names.number(operand) for operand in inputs],
            self._stack(trace),
            self.rules.number(rule),
            self.names.number(origin),
            sequence,
            cost.gemms,
            cost.bytes,
            round(cost.seconds * 1e9),
        ]

    def _stack(self, trace: str) -> int:
        frames = tuple((path, int(line), function) for path, line, function in FRAME.findall(trace))
        shown = [[self.files.number(path), line, function] for path, line, function in frames]
        return self.stacks.number(frames, shown)

    def data(self) -> dict[str, Any]:
        return {
            "names": self.names.values,
            "types": self.types.values,
            "rules": self.rules.values,
            "stacks": self.stacks.values,
            "files": [self._file(number, path) for number, path in enumerate(self.files.values)],
            "columns": list(map(list, zip(*self._lines.values))) or [[] for _ in range(11)],
        }

    def _file(self, number: int, path: str) -> dict[str, Any]:
        """The lines of a source file that stacks point to, and the lines around them."""
        lines = [line.rstrip("\n") for line in linecache.getlines(path)]
        named = {line for stack in self.stacks.values for file, line, _ in stack if file == number}
        if len(lines) > WHOLE_FILE:
            wanted = sorted({n for line in named for n in range(line - AROUND, line + AROUND + 1)})
        else:
            wanted = list(range(1, len(lines) + 1))
        numbers = [n for n in wanted if 0 < n <= len(lines)] or sorted(named)
        text = [lines[n - 1] if n <= len(lines) else "" for n in numbers]
        return {"path": shown_path(path), "installed": is_installed(path), "numbers": numbers, "lines": text}


INSTALLED = ("site-packages/", "dist-packages/")


def is_installed(path: str) -> bool:
    """Is it a file of a package, and not the user's own?"""
    return any(marker in path for marker in INSTALLED)


def shown_path(path: str) -> str:
    """A path without the parts that tell a reader nothing: the working directory, the place of installed packages."""
    for marker in INSTALLED:
        if marker in path:
            return path.rpartition(marker)[2]
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


Splice = tuple[int, int, list[int]]


def splices(before: Sequence[int], after: Sequence[int]) -> list[Splice]:
    """The edits that turn one sequence of distinct numbers into another: (where, how many to remove, what to insert).

    The longest run of numbers that are in the same order in both stays, so a node that moved is removed and inserted.
    """
    place = {number: index for index, number in enumerate(before)}
    stays = set(_longest_increasing([place[n] for n in after if n in place]))
    result: list[Splice] = []
    index = 0
    coming: list[int] = []

    def close(until: int) -> None:
        if until > index or coming:
            result.append((index, until - index, coming))

    for number in after:
        where = place.get(number, -1)
        if where not in stays:
            coming.append(number)
            continue
        close(where)
        index, coming = where + 1, []
    close(len(before))
    return result


def _longest_increasing(values: Sequence[int]) -> list[int]:
    ends: list[int] = []
    """The smallest last value of an increasing run of each length; `at` has its index."""
    at: list[int] = []
    previous = [-1] * len(values)
    for index, value in enumerate(values):
        length = bisect.bisect_left(ends, value)
        if length == len(ends):
            ends.append(value)
            at.append(index)
        else:
            ends[length], at[length] = value, index
        previous[index] = at[length - 1] if length else -1
    run = []
    index = at[-1] if at else -1
    while index >= 0:
        run.append(values[index])
        index = previous[index]
    return run[::-1]
