"""Declared examples: where a rule fires, and where it declines and why. The same examples serve as tests, as
documentation and as the gallery."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from ..errors import UnknownName
from ..ir.facts import tensor_of
from ..ir.partitioned import mark_gradients
from ..ir.text import DTYPES, type_of
from ..ir.weights import FIXED

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
BOTH = ("torch", "aten")


@dataclass(frozen=True)
class Example:
    """A small program, its inputs as `f32[4, 8]` or as values, and what the rule does with it."""

    program: Callable[..., Any]
    inputs: tuple[Any, ...]
    fires: bool
    because: str = ""
    """Part of the reason given where the rule declines; if empty, the pattern must not match at all."""
    dialects: Sequence[str] = BOTH
    dynamic: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments with which the rule is created, if it takes any."""
    is_inference: bool = True
    prepare: Callable[[torch.fx.Graph], None] | None = None
    """Applied to the captured graph first, for graphs that no program can express, such as one in a wrong order."""
    same_values: bool = True
    """False where random numbers come from another stream: only shapes, dtypes, strides and sharing are compared."""

    @property
    def source(self) -> str:
        """The program as it is written."""
        try:
            text = inspect.getsource(self.program).strip()
        except OSError:
            return self.program.__name__
        except TypeError:  # a module
            return str(self.program)
        expression = re.search(r"lambda.*", text, re.S)
        if expression and self.program.__name__ == "<lambda>":
            return _one_expression(expression.group(0))
        return text

    @property
    def conditions(self) -> str:
        """What it is run on and how: `2 x f32[4, 8] | dynamic | freeze=True`."""
        inputs = [type_of(i) if isinstance(i, torch.Tensor) else str(i) for i in self.inputs]
        settings = {**self.options, **self.settings}
        parts = [
            ", ".join(_with_counts(inputs)),
            "dynamic" if self.dynamic else "",
            "" if self.is_inference else "training",
            ", ".join(f"{name}={value}" for name, value in settings.items()),
        ]
        return " | ".join(part for part in parts if part)


def _with_counts(items: Sequence[str]) -> Iterator[str]:
    for item, run in groupby(items):
        count = len(list(run))
        yield f"{count} x {item}" if count > 1 else item


class _Lazily:
    def __init__(self, make: Callable[[], list[Example]]) -> None:
        self._make = make
        self._examples: list[Example] | None = None

    def __get__(self, rule: Any, owner: type) -> list[Example]:
        if self._examples is None:
            with torch.random.fork_rng(devices=[]):
                self._examples = self._make()
        return self._examples


def lazily(make: Callable[[], list[Example]]) -> Any:
    """Examples of a rule that are created on first access: those with modules, whose weights are drawn, or with random
    inputs. The user's random state is not touched, neither when the rule is imported nor later."""
    return _Lazily(make)


def fires(program: Callable[..., Any], *inputs: Any, **how: Any) -> Example:
    return Example(program, inputs, True, **how)


def declines(program: Callable[..., Any], *inputs: Any, because: str = "", **how: Any) -> Example:
    return Example(program, inputs, False, because, **how)


def others_are_weights(graph: torch.fx.Graph) -> None:
    """For `prepare` of an example: all inputs but the first are weights."""
    for node in graph.find_nodes(op="placeholder")[1:]:
        node.meta[FIXED] = True


def mark_as_gradients(graph: torch.fx.Graph) -> None:
    """For `prepare` of an example: the graph returns gradients of contiguous weights."""
    returned: Any = graph.output_node().args[0]
    mark_gradients(graph, [torch.empty(tensor_of(node).shape, device="meta") for node in returned])


def _one_expression(text: str) -> str:
    """A lambda, cut out of the surrounding call at the comma or bracket that ends it."""
    depth, seen_colon = 0, False
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                return text[:i].rstrip()
        elif char == ":" and depth == 0:
            seen_colon = True
        elif char == "," and depth == 0 and seen_colon:
            return text[:i].rstrip()
    return text


def make_input(spec: Any, generator: torch.Generator) -> Any:
    """A tensor for a spec such as `bf16[4, 8]`: normal floats, small integers, or booleans that are true half of the
    time. Other values are returned unchanged."""
    if not isinstance(spec, str) or not (parsed := re.fullmatch(r"(\w+)\[([\d, ]*)\]", spec)):
        return spec
    if (name := parsed.group(1)) not in DTYPE_OF:
        raise UnknownName("dtype of an example", name, DTYPE_OF)
    dtype = DTYPE_OF[name]
    shape = [int(s) for s in parsed.group(2).replace(" ", "").split(",") if s]
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def make_inputs(example: Example, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [make_input(spec, generator) for spec in example.inputs]
