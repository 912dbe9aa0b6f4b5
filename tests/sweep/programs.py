"""Small programs around one operator: alone, between two pointwise operations, and written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.models import Call

from .databases import Operator, Sample

Ones = dict[tuple[torch.dtype, bool], torch.Tensor]
"""Ones by dtype and whether they have a gradient."""

ALONE, BETWEEN, IN_PLACE, ERROR = "alone", "between", "in place", "error"


@dataclass(frozen=True)
class Program:
    """One program to compile and compare."""

    operator: Operator
    dtype: torch.dtype | None
    number: int
    form: str
    train: bool
    dynamic: bool
    function: Callable[..., Any]
    call: Call

    @property
    def name(self) -> str:
        dtype = "-" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        sizes = "dynamic" if self.dynamic else "static"
        mode = "gradient" if self.train else "forward"
        return f"{self.operator.name} {dtype} #{self.number} {self.form}, {mode}, {sizes}"


def programs(operator: Operator, dtype: torch.dtype, count: int, plan: Sequence[tuple[str, bool, bool]]) -> Iterator[Program]:
    """The programs of one operator in one dtype.

    `plan` lists combinations of form, gradient and dynamic sizes. The first sample runs in all of them; each further
    one of `count` in one, in turn, so that the number of programs stays near the number of samples.
    """
    differentiable = dtype.is_floating_point or dtype.is_complex
    for train in (True, False):
        if train and not differentiable:
            continue
        samples = operator.samples(dtype, gradient=train)
        chosen = spread(len(samples), count)
        mine = [step for step in plan if step[1] == train]
        for turn, number in enumerate(chosen):
            steps = mine if turn == 0 or not mine else [mine[turn % len(mine)]]
            for form, _, dynamic in steps:
                program = _program(operator, dtype, number, samples[number], form, train, dynamic)
                if program is not None:
                    yield program


def single(
    operator: Operator, dtype: torch.dtype, form: str, train: bool, dynamic: bool, sample: Sample | None = None
) -> Program | None:
    """One program: of the first sample, unless another is given; None where there is none of this form."""
    train = train and (dtype.is_floating_point or dtype.is_complex)
    samples = [sample] if sample is not None else operator.samples(dtype, gradient=train)
    return _program(operator, dtype, 0, samples[0], form, train, dynamic) if samples else None


def error_programs(operator: Operator) -> Iterator[Program]:
    for number, sample in enumerate(operator.errors()):
        yield Program(operator, None, number, ERROR, False, False, Alone(sample.function), sample.call)


def spread(length: int, count: int) -> list[int]:
    """`count` indices spread evenly over a list, the first and the last among them."""
    if length <= count:
        return list(range(length))
    if count == 1:
        return [0]
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def _program(
    operator: Operator, dtype: torch.dtype, number: int, sample: Sample, form: str, train: bool, dynamic: bool
) -> Program | None:
    program = Program(operator, dtype, number, form, train, dynamic, Alone(sample.function), sample.call)
    if form == ALONE:
        return program
    ones = _ones(sample.call)
    if form == BETWEEN:
        call = Call((ones, *sample.call.args), sample.call.kwargs)
        return replace(program, function=Between(sample.function), call=call)
    if sample.in_place is None:
        return None
    if not train:
        return replace(program, function=Alone(sample.in_place))
    # a leaf that wants a gradient cannot be written, the product before it can
    call = Call((ones, *sample.call.args), sample.call.kwargs)
    return replace(program, function=Between(sample.in_place), call=call)


class Alone(nn.Module):
    """The operator and nothing else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Between(nn.Module):
    """Every tensor times a one before the operator, every result subtracted from a one after it.

    The ones are arguments, so that no pass can fold them, and leave the operands' values as they are. Operands that
    have a gradient get ones that have one too.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ones: Ones, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _each_tensor(args, ones, _times_one), _each_tensor(kwargs, ones, _times_one)
        return _each_tensor(self.function(*args, **kwargs), ones, _one_minus)


def _times_one(value: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return value & one if value.dtype == torch.bool else value * one


def _one_minus(value: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return ~value if value.dtype == torch.bool else one - value


def _each_tensor(value: Any, ones: Ones, apply: Callable[..., Any]) -> Any:
    if isinstance(value, torch.Tensor):
        key = (value.dtype, value.requires_grad)
        return apply(value, ones[key]) if value.layout == torch.strided and key in ones else value
    if type(value) in (list, tuple):
        return type(value)([_each_tensor(v, ones, apply) for v in value])
    if isinstance(value, dict):
        return {k: _each_tensor(v, ones, apply) for k, v in value.items()}
    return value


def _ones(call: Call) -> Ones:
    """A one of each dtype that the operands have, and of those that results often have."""
    leaves = torch.utils._pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_quantized]
    keys = dict.fromkeys((t.dtype, t.requires_grad) for t in tensors)
    keys |= dict.fromkeys((dtype, False) for dtype in (torch.int64, torch.bool, torch.float32))
    return {(dtype, grad): torch.ones((), dtype=dtype, requires_grad=grad) for dtype, grad in keys}
