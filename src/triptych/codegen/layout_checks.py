"""Compare the layouts of all inputs in one call of C++ code, not in one call for each input.

At every call, generated code compares sizes and strides of each input with those that it was compiled for: hundreds of
small calls in a training step. Once a call has passed these checks, the inputs of later calls are compared with its
inputs, all together, by torch's `TensorGuards`, which keeps their layouts and no tensor. If one of them differs, that
call is checked as before. The results of operators that generated code calls are checked at every call: they may depend
on more than the layouts of the inputs.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _private

INPUTS = re.compile(r"^ +([\w, ]+) = args$", re.MULTILINE)
# Only numbers: a check of a symbolic size stays.
CHECK = re.compile(r"^( +)assert_size_stride\((\w+), [\d(), ]+(?:, '[^'\n]*')?\)$", re.MULTILINE)


class KnownLayouts:
    """The layouts of inputs that have passed the checks. A copy of the generated code starts without them."""

    TRIES = 4
    """How often layouts are noted. Some inputs have none, and in some programs they differ at every call."""

    def __init__(self) -> None:
        self.guards: Any = None
        self.tries_left = self.TRIES

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownLayouts, ()

    def of(self, args: Sequence[Any]) -> Any:
        """Guards to compare later inputs with; None if no more layouts are to be noted."""
        if not self.tries_left:
            return None
        self.tries_left -= 1
        return layouts_of(args)


def join_layout_checks(module: types.ModuleType) -> None:
    """Let a module of generated code compare the layouts of all its inputs in one call."""
    runner: Any = getattr(vars(module).get("call"), "__self__", None)
    if not hasattr(runner, "call") or hasattr(runner, "known_layouts"):
        return
    function = runner.call.__func__
    if (without := without_checks(function)) is None:
        return
    with_checks = types.FunctionType(function.__code__, function.__globals__)
    runner.known_layouts = KnownLayouts()
    runner.call_with_checks = types.MethodType(with_checks, runner)
    runner.call_without_checks = types.MethodType(without, runner)
    runner.call_and_note_layouts = types.MethodType(call_and_note_layouts, runner)
    # callers already have the bound method, so the function object stays and its code is replaced
    function.__code__ = call.__code__


def call(self: Any, args: list[Any]) -> Any:
    """The new code of a runner's method `call`. It runs in the generated module, which knows no name of this file."""
    guards = self.known_layouts.guards
    if guards is not None and guards.check(*args):
        return self.call_without_checks(args)
    return self.call_and_note_layouts(args)


def call_and_note_layouts(runner: Any, args: list[Any]) -> Any:
    guards = runner.known_layouts.of(args)  # before the call, which empties the list
    result = runner.call_with_checks(args)
    if guards is not None:
        runner.known_layouts.guards = guards
    return result


def without_checks(function: types.FunctionType) -> types.FunctionType | None:
    """The method without checks of inputs, with the same line numbers; None if it has no checks or no source file."""
    code = function.__code__
    try:
        lines = Path(code.co_filename).read_text(encoding="utf-8").split("\n")
        first = code.co_firstlineno - 1
        indent = len(lines[first]) - len(lines[first].lstrip())
        inside = re.compile(rf"\s*$|\s{{{indent + 1}}}")
        last = next((i for i, line in enumerate(lines) if i > first and not inside.match(line)), len(lines))
        text = "\n".join(lines[first:last])
        inputs = {name for unpacked in INPUTS.findall(text) for name in re.findall(r"\w+", unpacked)}
        body = CHECK.sub(lambda check: f"{check[1]}pass" if check[2] in inputs else check[0], text)
        if body == text:
            return None
        # a method's definition is indented: the line above it opens a block
        source = "\n" * (first - 1) + f"if True:\n{body}\n"
        names: dict[str, Any] = {}
        exec(compile(source, code.co_filename, "exec"), names)  # defines the method, and runs nothing of it
        return types.FunctionType(names[function.__name__].__code__, function.__globals__)
    except (OSError, ValueError, SyntaxError, LookupError):  # the file has changed: leave the code as it is
        return None


def layouts_of(args: Sequence[Any]) -> Any:
    """Guards to compare later inputs with; None if these are not plain tensors, or one is given twice."""
    if any(type(arg) not in (torch.Tensor, torch.nn.Parameter) or arg.layout != torch.strided for arg in args):
        return None
    if len({id(arg) for arg in args}) != len(args):
        return None
    return _private.TensorGuards(
        *args,
        dynamic_dims_sizes=[list(arg.shape) for arg in args],
        dynamic_dims_strides=[list(arg.stride()) for arg in args],
    )
