"""Check sizes and strides once for each layout of the inputs, not at every call.

At every call, generated code compares sizes and strides of each input, and of each result of an operator that it calls,
with those that it was compiled for: hundreds of small calls in a training step. If no size is symbolic, the inputs'
layouts decide all of them. So after a call has passed the checks, calls with inputs of the same layouts skip them. The
inputs' layouts are still compared at every call, all of them in one call of C++ code.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _private

# Only numbers: a check of a symbolic size stays.
CHECK = re.compile(r"^( +)assert_(?:size_stride|alignment)\(\w+, [\d(), ]+(?:, '[^'\n]*')?\)$", re.MULTILINE)


def check_layouts_once(module: types.ModuleType) -> None:
    """Let a module of generated code skip the checks for inputs whose layouts have passed them."""
    runner: Any = getattr(vars(module).get("call"), "__self__", None)
    if not hasattr(runner, "call") or hasattr(runner, "layouts"):
        return
    function = runner.call.__func__
    if (unchecked := without_checks(function)) is None:
        return
    checked = types.FunctionType(function.__code__, function.__globals__)

    def call_checked(args: list[Any]) -> Any:
        layouts = layouts_of(args) if runner.layouts is None else None  # the call empties the list
        result = checked(runner, args)
        if layouts is not None:
            runner.layouts = layouts
        return result

    runner.layouts = None
    runner.call_checked = call_checked
    runner.call_unchecked = types.MethodType(unchecked, runner)
    # the bound method is in others' hands already, so the function stays and its code changes
    function.__code__ = call.__code__


def call(self: Any, args: list[Any]) -> Any:
    """The new code of a runner's method `call`; it knows no names but those of its arguments."""
    if self.layouts is not None and self.layouts.check(*args):
        return self.call_unchecked(args)
    return self.call_checked(args)


def without_checks(function: types.FunctionType) -> types.FunctionType | None:
    """The method without its checks, every line at its place; None if it has no checks or its source is gone."""
    code = function.__code__
    try:
        lines = Path(code.co_filename).read_text().splitlines(keepends=True)
    except OSError:
        return None
    first = code.co_firstlineno - 1
    indent = len(lines[first]) - len(lines[first].lstrip())
    inside = re.compile(rf"\s*$|\s{{{indent + 1}}}")
    last = next((i for i, line in enumerate(lines) if i > first and not inside.match(line)), len(lines))
    body, checks = CHECK.subn(r"\1pass", "".join(lines[first:last]))
    if not checks:
        return None
    # a method's definition is indented: the line above it opens a block
    source = "\n" * (first - 1) + f"if True:\n{body}"
    names: dict[str, Any] = {}
    exec(compile(source, code.co_filename, "exec"), names)  # defines the method, and runs nothing of it
    return types.FunctionType(names[function.__name__].__code__, function.__globals__)


def layouts_of(args: Sequence[Any]) -> Any:
    """Compares later inputs with these; None if they are not plain tensors, or one is given twice."""
    if any(type(arg) not in (torch.Tensor, torch.nn.Parameter) or arg.layout != torch.strided for arg in args):
        return None
    if len({id(arg) for arg in args}) != len(args):
        return None
    return _private.TensorGuards(
        *args,
        dynamic_dims_sizes=[list(arg.shape) for arg in args],
        dynamic_dims_strides=[list(arg.stride()) for arg in args],
    )
