"""Compare the layouts of all inputs in one call of C++ code, not in one call for each input.

At every call, generated code compares sizes and strides of each input with those that it was compiled for: hundreds of
small calls in a training step. Once a call has passed these checks, the inputs of later calls are compared with its
inputs, all together. If one of them differs, that call is checked as before. The results of operators that generated
code calls are checked at every call: they may depend on more than the layouts of the inputs.
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


def check_layouts_once(module: types.ModuleType) -> None:
    """Let a module of generated code skip the checks of inputs whose layouts have passed them."""
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
    """The method without checks of inputs, every line at its place; None if there are none or the source is gone."""
    code = function.__code__
    try:
        lines = Path(code.co_filename).read_text().splitlines(keepends=True)
    except OSError:
        return None
    first = code.co_firstlineno - 1
    indent = len(lines[first]) - len(lines[first].lstrip())
    inside = re.compile(rf"\s*$|\s{{{indent + 1}}}")
    last = next((i for i, line in enumerate(lines) if i > first and not inside.match(line)), len(lines))
    text = "".join(lines[first:last])
    inputs = {name for unpacked in INPUTS.findall(text) for name in re.findall(r"\w+", unpacked)}
    body = CHECK.sub(lambda check: f"{check[1]}pass" if check[2] in inputs else check[0], text)
    if body == text:
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
