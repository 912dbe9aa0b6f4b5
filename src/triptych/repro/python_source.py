"""A captured graph as plain Python: a function that calls torch, with one line for each node."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import keyword
import math
import operator
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..ir.facts import fact
from ..ir.modules import attribute
from ..ir.text import source_line, type_of

INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
    operator.eq: "==", operator.ne: "!=",
}  # fmt: skip
INDENT = "    "
WIDTH = 100
AUTOCAST = ("device_type", "dtype", "enabled", "cache_enabled")
LOADED_WITH_TORCH = ("torch.nn", "torch._C", "torch.special", "torch.linalg", "torch.fft", "torch.functional")
OF_THE_FILE = frozenset(
    ("torch", "sys", "model", "program", "args", "options", "train", "dynamic", "run_repro", "with_weights")
)
"""The names that a written file uses outside its functions."""
RESERVED = {*OF_THE_FILE, "operator", "math", "self"}


class NotPython(Exception):
    """Something in the graph that cannot be written as Python; the message says what."""


@dataclass
class Source:
    """The text of one function and what it needs around it."""

    name: str
    parameters: list[str]
    lines: list[str]
    modules: set[str] = field(default_factory=set)
    """Modules to import."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Attributes of the graph's module, by the name of the parameter that passes them, after the graph's inputs."""

    def text(self) -> str:
        signature = ", ".join([*self.parameters, *self.tensors])
        if len(signature) > WIDTH:
            signature = "\n" + textwrap.fill(signature, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT) + "\n"
        return "\n".join([f"def {self.name}({signature}):", *self.lines])

    def imports(self) -> list[str]:
        return [f"import {module}" for module in sorted(self.modules - {"torch"})]

    def function(self) -> Callable[..., Any]:
        """The function that the text defines."""
        scope: dict[str, Any] = {"torch": torch}
        for name in self.modules:
            importlib.import_module(name)
            top = name.partition(".")[0]
            scope[top] = importlib.import_module(top)
        exec(compile(self.text(), f"<{self.name}>", "exec"), scope)  # text that we wrote, never text from a file
        return scope[self.name]


def python_source(gm: GraphModule, name: str = "model") -> Source:
    """The graph as a Python function of its inputs. Raises NotPython where that cannot be done."""
    return _Writer(gm).write(name)


class _Writer:
    def __init__(self, gm: GraphModule, taken: set[str] | None = None) -> None:
        self.gm = gm
        self.taken = RESERVED | set(dir(builtins)) | (taken or set())
        self.names: dict[Node, str] = {}
        self.modules: set[str] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.attribute_names: dict[str, str] = {}
        """Python names of the tensors and sub-graphs that are attributes of the module, by path."""
        self.lines: list[str] = []
        self.depth = 1

    def write(self, name: str) -> Source:
        nodes = self.gm.graph.nodes
        self.reserve_modules()
        parameters = [self.name(node) for node in nodes if node.op == "placeholder"]
        for node in nodes:
            if node.op != "placeholder":
                self.node(node)
        return Source(name, parameters, self.lines, self.modules, self.tensors)

    def reserve_modules(self) -> None:
        """No value may have the name of a module that this function, or one nested in it, calls."""
        for gm in self.gm.modules():
            if isinstance(gm, GraphModule):
                for node in (n for n in gm.graph.nodes if n.op == "call_function"):
                    with contextlib.suppress(NotPython):
                        self.callee(node.target)
        self.taken |= {module.partition(".")[0] for module in self.modules}

    # ---- lines ----

    def node(self, node: Node) -> None:
        target = getattr(node.target, "__name__", "")
        if node.op == "output":
            self.line(f"return {self.value(node.args[0])}")
        elif node.op == "get_attr":
            self.attribute(node)
        elif target == "_enter_autocast":
            given = dict(zip(AUTOCAST, node.args)) | node.kwargs
            self.line(f"with torch.autocast({', '.join(f'{k}={self.value(v)}' for k, v in given.items())}):")
            self.depth += 1
        elif target == "_exit_autocast":
            if self.lines[-1].endswith(":"):
                self.line("pass")
            self.depth -= 1
        else:
            text = self.call(node)
            if not node.users and fact(node) is None:  # a call for its effect
                self.line(text, node)
            else:
                self.line(f"{self.name(node)} = {text}", node)

    def line(self, text: str, node: Node | None = None) -> None:
        notes = []
        if node is not None:
            value = fact(node)
            notes = [note for note in (type_of(value) if value is not None else "", source_line(node)) if note]
        self.lines.append(INDENT * self.depth + text + (f"  # {'  '.join(notes)}" if notes else ""))

    def attribute(self, node: Node) -> None:
        path = str(node.target)
        if path not in self.attribute_names:
            value = attribute(self.gm, path)
            self.attribute_names[path] = own = self.fresh(path)
            if isinstance(value, GraphModule):
                self.nested(own, value)
            elif isinstance(value, torch.Tensor):
                self.tensors[own] = value
            else:
                raise NotPython(f"{path} is a {type(value).__name__}")
        self.names[node] = self.attribute_names[path]

    def nested(self, name: str, gm: GraphModule) -> None:
        """Writes a sub-graph, such as a branch of `cond`, as a nested function."""
        inner = _Writer(gm, self.taken)
        source = inner.write(name)
        if source.tensors:
            raise NotPython(f"the sub-graph {name} holds tensors of its own")
        self.modules |= source.modules
        for text in source.text().splitlines():
            self.line(text)

    # ---- expressions ----

    def call(self, node: Node) -> str:
        if node.op == "call_method":
            return f"{self.operand(node.args[0])}.{node.target}({self.arguments(node.args[1:], node.kwargs)})"
        if node.op == "call_module":
            raise NotPython(f"the module {node.target} is called whole")
        target: Any = node.target
        if target is operator.getitem and len(node.args) == 2:
            return f"{self.operand(node.args[0])}[{self.index(node.args[1])}]"
        if target in INFIX and len(node.args) == 2 and not node.kwargs:
            return f"{self.operand(node.args[0])} {INFIX[target]} {self.operand(node.args[1])}"
        if target is operator.neg:
            return f"-{self.operand(node.args[0])}"
        return f"{self.callee(target)}({self.arguments(node.args, node.kwargs)})"

    def callee(self, target: Any) -> str:
        if isinstance(target, _private.OpOverload):
            return f"torch.ops.{target}"
        if isinstance(target, _private.HigherOrderOperator):
            return f"torch.ops.higher_order.{target.name()}"
        short = getattr(target, "__name__", "")
        if getattr(builtins, short, None) is target:
            return short
        if getattr(torch.nn.functional, short, None) is target:
            return f"torch.nn.functional.{short}"  # `torch._C._nn.linear` by the name that people know
        try:
            path = _private.qualified_name(target).removeprefix("_")
        except Exception as error:
            raise NotPython(f"{target!r} has no name to call it by") from error
        module = path.rpartition(".")[0]
        while module and not _is_module(module):
            module = module.rpartition(".")[0]
        if not module or _resolve(path) is not target:
            raise NotPython(f"{path} cannot be imported")
        if not module.startswith(LOADED_WITH_TORCH):
            if module != "torch" and module.partition(".")[0] in OF_THE_FILE - {"torch", "sys"}:
                raise NotPython(f"the module {module} has a name that the file uses itself")
            self.modules.add(module)
        return path

    def arguments(self, args: Any, kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.value, args), *(f"{k}={self.value(v)}" for k, v in kwargs.items())])

    def operand(self, value: Any) -> str:
        """A value next to an operator or before a dot: a negative number is put in parentheses."""
        text = self.value(value)
        return text if isinstance(value, Node) or text.replace(".", "").isalnum() else f"({text})"

    def index(self, value: Any) -> str:
        if isinstance(value, tuple) and value:
            return ", ".join(map(self.index, value)) + ("," if len(value) == 1 else "")
        if isinstance(value, slice):
            parts = [value.start, value.stop] + ([value.step] if value.step is not None else [])
            return ":".join("" if p is None else self.value(p) for p in parts)
        return self.value(value)

    def value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.name(value)
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if isinstance(value, list):
            return "[" + ", ".join(map(self.value, value)) + "]"
        if isinstance(value, tuple):
            return "(" + ", ".join(map(self.value, value)) + ("," if len(value) == 1 else "") + ")"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
        return literal(value)

    # ---- names ----

    def name(self, node: Node) -> str:
        if node not in self.names:
            self.names[node] = self.fresh(node.name)
        return self.names[node]

    def fresh(self, wanted: str) -> str:
        """A short name: `l_self_modules_head_parameters_weight_` is `head_weight`."""
        short = re.sub(r"^(L|l)_(self_)?", "", wanted)
        short = re.sub(r"(?<![^_])(modules|parameters|buffers)_", "", short)
        short = re.sub(r"\W", "_", short).strip("_") or "value"
        short = short if not short[0].isdigit() and not keyword.iskeyword(short) else f"v_{short}"
        unique, number = short, 1
        while unique in self.taken:
            unique, number = f"{short}_{number}", number + 1
        self.taken.add(unique)
        return unique


def literal(value: Any) -> str:
    """A constant as Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'"{value}"'
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotPython(f"the symbol {value} stands in the graph")
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if value is None or value is ... or isinstance(value, (bool, int, float, str, complex)):
        return "..." if value is ... else json.dumps(value) if isinstance(value, str) else repr(value)
    raise NotPython(f"a {type(value).__name__} stands in the graph")


def _is_module(path: str) -> bool:
    try:
        importlib.import_module(path)
    except Exception:
        return False
    return True


def _resolve(path: str) -> Any:
    module, _, rest = path, "", ""
    while not _is_module(module):
        module, _, part = module.rpartition(".")
        rest = f"{part}.{rest}" if rest else part
        if not module:
            return None
    value: Any = importlib.import_module(module)
    for part in rest.split(".") if rest else ():
        value = getattr(value, part, None)
    return value
