"""A random program as text: the lines that create its inputs, its statements, and what it returns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = {"torch": torch, "nn": nn, "F": F, "math": math}
NAME = re.compile(r"\b[a-z]+\d+\b")
"""x0: an argument, p0: a parameter, b0: a buffer, s0: a tensor that arguments are views of, v0: a computed value."""

SIZES = (7, 11)
"""The dynamic size `N` in the first and in the second call."""


@dataclass(frozen=True)
class Program:
    seed: int
    setup: tuple[str, ...]
    """`x0 = torch.randn(3, 4)`: arguments, parameters, buffers, and the tensors they are views of."""
    body: tuple[str, ...]
    returned: tuple[str, ...]
    train: bool = False
    """Call backward and compare gradients; otherwise no input requires a gradient."""
    dynamic: bool = False
    """Sizes that depend on N change with the second call."""
    route: str = "compile"
    """How it is compiled: see `judge.py`."""
    codegen: str = "eager"

    @property
    def arguments(self) -> list[str]:
        return [name for name in map(_target, self.setup) if name[0] == "x"]

    @property
    def state(self) -> list[str]:
        return [name for name in map(_target, self.setup) if name[0] in "pb"]

    @property
    def needs_dynamo(self) -> bool:
        """Python that a graph of torch calls cannot express; an attribute of the module that is assigned to."""
        return any(re.match(r"(with|if|for) |[pb]\d+ .?= |torch\._dynamo|.*(torch\.cond|\.item\(|\bif\b|\bfor\b|\.shape|\.dtype|nn\.Identity)", line) for line in self.body)

    def source(self) -> str:
        """The program as a function of its arguments, or as a module where it has parameters or buffers."""
        result = ", ".join(self.returned) + ("," if len(self.returned) == 1 else "")
        lines = [*self.body, f"return ({result})"]
        arguments = ", ".join(self.arguments)
        if not self.state:
            return f"def program({arguments}):\n" + _indented(lines, 1)
        assignments = [f"self.{name} = {name}" if name[0] == "p" else f'self.register_buffer("{name}", {name})' for name in self.state]
        own = re.compile(rf"\b({'|'.join(self.state)})\b")
        return (
            "class Model(nn.Module):\n"
            f"    def __init__(self, {', '.join(self.state)}):\n"
            + _indented(["super().__init__()", *assignments], 2)
            + f"\n    def forward(self{', ' * bool(arguments)}{arguments}):\n"
            + _indented([own.sub(r"self.\1", line) for line in lines], 2)
        )

    def inputs(self, call: int = 0) -> dict[str, Any]:
        """Every tensor the setup creates, by name; other values in each call, and other sizes where they are dynamic."""
        space: dict[str, Any] = {**NAMES, "N": SIZES[call if self.dynamic else 0]}
        torch.manual_seed(self.seed * 2 + call)
        for line in self.setup:
            exec(line, space)
        return {name: value for name, value in space.items() if isinstance(value, Tensor)}

    def function(self, inputs: dict[str, Any]) -> Callable[..., Any]:
        """A function of the arguments; parameters and buffers are those of `inputs`."""
        space: dict[str, Any] = dict(NAMES)
        exec(self.source(), space)
        if not self.state:
            return space["program"]
        return space["Model"](*[inputs[name] for name in self.state])

    def __str__(self) -> str:
        how = f"train={self.train} dynamic={self.dynamic} route={self.route} codegen={self.codegen}"
        return f"# seed {self.seed}: {how}\n" + "\n".join(self.setup) + "\n\n" + self.source()


def _target(line: str) -> str:
    return line.partition(" ")[0]


def _indented(lines: list[str], level: int) -> str:
    return "\n".join("    " * level + line for line in lines) + "\n"


def names_in(text: str) -> set[str]:
    return set(NAME.findall(text))
