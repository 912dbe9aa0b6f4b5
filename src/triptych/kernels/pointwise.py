"""Pointwise functions of one value as text: what `triptych::b2b_gemm` applies between its two products.

A function is a list of steps, each an operation on earlier values and numbers: `mul v0 0.5; tanh v0; mul v1 v2`.
v0 is the argument, step i makes v(i + 1), the last one is the result. Steps compute in float32, or in float64 if the
argument is so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Operand = int | float
"""The number of an earlier value, or, as a float, a number."""


@dataclass(frozen=True)
class Operation:
    """An operation in its two forms."""

    parameters: tuple[str, ...]
    """The parameter names of the canonical call."""
    in_torch: Callable[..., torch.Tensor]
    in_triton: str
    """With {0}, {1} and {2} for the operands; SHORT is true where the result is rounded to 16 bits."""


def _maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.maximum(*_tensors(x, y))


def _minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.minimum(*_tensors(x, y))


def _tensors(*values: torch.Tensor) -> list[torch.Tensor]:
    like = next(v for v in values if isinstance(v, torch.Tensor))
    return [torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in values]


def _parameters(names: str, in_torch: Callable[..., torch.Tensor], in_triton: str) -> Operation:
    return Operation(tuple(names.split()), in_torch, in_triton)


ONE, TWO = "self", "self other"
LARGER = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
SMALLER = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"

COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
"""Their results are conditions: only `where` and `float` take one. All other operands are numbers."""

OPERATIONS: dict[str, Operation] = {
    "add": _parameters(TWO, torch.add, "({0} + {1})"),
    "sub": _parameters(TWO, torch.sub, "({0} - {1})"),
    "mul": _parameters(TWO, torch.mul, "({0} * {1})"),
    "div": _parameters(TWO, torch.div, "({0} / {1})"),
    "neg": _parameters(ONE, torch.neg, "(-{0})"),
    "abs": _parameters(ONE, torch.abs, "tl.abs({0})"),
    "relu": _parameters(ONE, torch.relu, LARGER.format("{0}", "0.0")),
    "maximum": _parameters(TWO, _maximum, LARGER),
    "minimum": _parameters(TWO, _minimum, SMALLER),
    "exp": _parameters(ONE, torch.exp, "tl.exp({0})"),
    "erf": _parameters(ONE, torch.erf, "erf({0}, SHORT)"),
    "sigmoid": _parameters(ONE, torch.sigmoid, "tl.sigmoid({0})"),
    "tanh": _parameters(ONE, torch.tanh, "tanh({0})"),
    "reciprocal": _parameters(ONE, torch.reciprocal, "(1 / {0})"),
    "sqrt": _parameters(ONE, torch.sqrt, "tl.sqrt_rn({0})"),
    "rsqrt": _parameters(ONE, torch.rsqrt, "tl.rsqrt({0})"),
    "sin": _parameters(ONE, torch.sin, "tl.sin({0})"),
    "cos": _parameters(ONE, torch.cos, "tl.cos({0})"),
    "log": _parameters(ONE, torch.log, "tl.log({0})"),
    **{name: _parameters(TWO, getattr(torch, name), f"({{0}} {sign} {{1}})") for name, sign in COMPARISONS.items()},
    "float": _parameters(ONE, torch.Tensor.float, "{0}.to(tl.float32)"),
    "where": _parameters(f"condition {TWO}", torch.where, "tl.where({0}, {1}, {2})"),
}
"""By canonical name; `float` makes 1.0 and 0.0 of a condition. Operations that Triton computes with less than
the precision of float32 for small arguments (`expm1`, `log1p` by way of `exp` and `log`) are left out."""


@dataclass(frozen=True)
class Step:
    name: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function of one value."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "; ".join(" ".join((s.name, *map(_written, s.operands))) for s in self.steps)

    @staticmethod
    def read(text: str) -> Pointwise:
        steps: list[Step] = []
        for line in filter(None, map(str.strip, text.split(";"))):
            name, *operands = line.split()
            if name not in OPERATIONS or len(operands) != len(OPERATIONS[name].parameters):
                raise ValueError(f"no pointwise operation of {len(operands)} operands: {name}")
            steps.append(Step(name, tuple(_read(operand, len(steps)) for operand in operands)))
        return Pointwise(tuple(steps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Evaluates the function with torch, in float32 or float64; the result has the argument's dtype."""
        values = [x if x.dtype == torch.float64 else x.float()]
        for step in self.steps:
            operands = [values[o] if isinstance(o, int) else o for o in step.operands]
            values.append(OPERATIONS[step.name].in_torch(*operands))
        return values[-1].to(x.dtype)

    def in_triton(self, indent: str) -> str:
        """Assignments that compute `result` from `v0`."""
        lines = [
            f"v{i} = {OPERATIONS[step.name].in_triton.format(*map(_in_triton, step.operands))}"
            for i, step in enumerate(self.steps, 1)
        ]
        return "\n".join(indent + line for line in (*lines, f"result = v{len(lines)}"))


def _written(operand: Operand) -> str:
    return f"v{operand}" if isinstance(operand, int) else repr(operand)


def _read(text: str, known: int) -> Operand:
    if not text.startswith("v"):
        return float(text)
    if not 0 <= int(text[1:]) <= known:
        raise ValueError(f"{text} is not computed yet")
    return int(text[1:])


def _in_triton(operand: Operand) -> str:
    if isinstance(operand, int):
        return f"v{operand}"
    return repr(operand) if math.isfinite(operand) else f'float("{operand}")'
