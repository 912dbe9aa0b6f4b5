"""Parses Inductor's generated source: the kernels, their calls, and the nodes that each call computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFINITION = re.compile(r"^(\w+) = async_compile\.(\w+)\((.*)$")
HANDLE = re.compile(r"^\s*# \[Provenance debug handles\] (.+:\d+)$")
CALL = re.compile(r"^\s+(?:\w+ = )?(?P<name>extern_kernels\.\w+|torch\.ops\.[\w.]+|\w+)(?:\.run)?\(")
FUNCTION = re.compile(r"\s*def (?!benchmark_)(\w+)\((?:self, )?args\)")
"""A function that runs a graph, a part of it, or a graph inside it."""
LANGUAGES = {"cpp_pybinding": "cpp", "cpp": "cpp", "triton": "python", "cuda": "cpp", "metal": "cpp"}


@dataclass(frozen=True)
class Kernel:
    """One kernel that Inductor generated."""

    name: str
    language: str
    """For highlighting: "cpp" or "python"."""
    source: str
    line: int
    """Where its source begins in the generated file, counted from 1."""


@dataclass(frozen=True)
class KernelCall:
    """One launch: of a generated kernel, of a library's, or of an operator."""

    name: str
    text: str
    line: int
    nodes: tuple[str, ...] = ()
    function: str = "call"
    """The function of the generated file that it stands in: "call", a part of it, or a graph inside the graph."""


def kernels(source: str) -> list[Kernel]:
    """The kernels that a generated file defines."""
    lines = source.splitlines()
    result = []
    number = 0
    while number < len(lines):
        definition = DEFINITION.match(lines[number])
        if definition is None:
            number += 1
            continue
        name, how, rest = definition.groups()
        quote = next((q for q in ("'''", '"""') if q in rest), "")
        end = number + 1
        while quote and end < len(lines) and not lines[end].startswith(quote):
            end += 1
        body = "\n".join(lines[number + 1 : end]).strip("\n")
        result.append(Kernel(name, LANGUAGES.get(how, "python"), body, number + 2))
        number = end + 1
    return result


def kernel_calls(source: str, nodes: Mapping[str, Sequence[str]] | None = None) -> list[KernelCall]:
    """The launches of a generated file in order; `nodes` has the nodes of each by `kernel:number`, as in a session.

    Those in a graph inside the graph count once, however often it is called.
    """
    generated = {kernel.name for kernel in kernels(source)}
    lines = source.splitlines()
    result: list[KernelCall] = []
    handle = ""
    function = ""
    for number, line in enumerate(lines, 1):
        if begins := FUNCTION.match(line):
            function = begins[1]
        elif re.match(r"\S", line):
            function = ""
        if not function:
            continue
        if handle_line := HANDLE.match(line):
            handle = handle_line.group(1)
            continue
        called = CALL.match(line)
        if called is None:
            continue
        name = called["name"]
        if name in generated or name.startswith(("extern_kernels.", "torch.ops.")):
            result.append(KernelCall(name, line.strip(), number, tuple((nodes or {}).get(handle, ())), function))
            handle = ""
    return result
