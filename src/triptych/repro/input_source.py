"""The inputs of a program as Python expressions: seeded random tensors like those that were given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _private
from ..verify.inputs import hint
from .python_source import NotPython, literal

SMALL = 32
"""Integer and boolean tensors of at most this many elements are written out as literals."""

LARGEST_READ = 1 << 22
"""The values of larger tensors are not inspected."""

ANY_FLOAT = "torch.randn({size}{kind})"
ANY_BOOL = "torch.rand({size}{device}) > 0.5"


@dataclass(frozen=True)
class Input:
    """One input: how to draw its values, and its layout in memory."""

    draw: str
    """An expression with `{size}`, `{kind}` (dtype and device) and `{device}` left open; or a whole literal."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """None: not a tensor."""
    device: str = "cpu"
    requires_grad: bool = False
    is_weight: bool = False
    """A parameter or a buffer of the model."""

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    @property
    def written_out(self) -> bool:
        return "{" not in self.draw

    def expression(self) -> str:
        """Python source that makes the input."""
        if not self.is_tensor:
            return self.draw
        text = self._laid_out()
        return f"{text}.requires_grad_()" if self.requires_grad else text

    def make(self) -> Any:
        return eval(self.expression(), {"torch": torch})  # text that we wrote, never text from a file

    def with_shape(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> Input:
        """The input with another size. Values that were written out are replaced by random booleans, or by zeros."""
        draw = self.draw
        if self.written_out:
            draw = ANY_BOOL if self.dtype == torch.bool else "torch.zeros({size}{kind})"
        return replace(self, draw=draw, shape=shape, stride=stride)

    def _laid_out(self) -> str:
        if self.stride == _contiguous(self.shape):
            return _bracketed(self._drawn(self.shape), self.requires_grad)
        if self.written_out:
            where = f"{self.shape}, {self.stride}{self._kind()}"
            return f"torch.empty_strided({where}).copy_({self.draw})"
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if math.prod(self.shape) else 0
        return f"{_bracketed(self._drawn((span,)), True)}.as_strided({self.shape}, {self.stride})"

    def _drawn(self, shape: tuple[int, ...]) -> str:
        device = "" if self.device == "cpu" else f', device="{self.device}"'
        return self.draw.format(size=f"{shape}" if shape else "()", kind=self._kind(), device=device)

    def _kind(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f", dtype={self.dtype}"
        return dtype + ("" if self.device == "cpu" else f', device="{self.device}"')


def input_like(value: Any, known: torch.Tensor | None = None) -> Input:
    """An input like a value of a captured program, which may be fake; `known` is the real tensor, if there is one."""
    if isinstance(value, torch.SymInt):
        return Input(str(hint(value)))
    if not isinstance(value, torch.Tensor):
        return Input(literal(value))
    if not _private.is_ordinary(value):
        raise NotPython(f"an input is of type {type(value).__name__}, layout {value.layout}")
    shape, stride = tuple(hint(s) for s in value.shape), tuple(hint(s) for s in value.stride())
    real = known if known is not None else None if isinstance(value, _private.FakeTensor) else value
    given = Input("", shape, stride, value.dtype, str(value.device), value.requires_grad)
    return replace(given, draw=_draw_like(given, real))


def inputs_like(values: Sequence[Any], known: Sequence[torch.Tensor | None] = ()) -> list[Input]:
    real = [*known, *[None] * (len(values) - len(known))]
    return [input_like(value, tensor) for value, tensor in zip(values, real)]


def make_inputs(inputs: Sequence[Input]) -> list[Any]:
    """The inputs as the written program makes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [one.make() for one in inputs]


def _draw_like(given: Input, real: torch.Tensor | None) -> str:
    dtype = given.dtype
    assert dtype is not None
    if real is not None and 0 < real.numel() <= LARGEST_READ:
        values = real.detach().cpu()
        if bool((values == values.flatten()[0]).all()):
            return f"torch.full({{size}}, {literal(values.flatten()[0].item())}{{kind}})"
    else:
        values = None
    if dtype == torch.bool:
        return ANY_BOOL if values is None or values.numel() > SMALL else _written(values, given)
    if dtype.is_complex:
        return ANY_FLOAT
    if dtype.is_floating_point:
        return _floats(values, dtype)
    if values is None:
        return "torch.randint(0, 2, {size}{kind})"
    if values.numel() <= SMALL:
        return _written(values, given)
    return f"torch.randint({int(values.min())}, {int(values.max()) + 1}, {{size}}{{kind}})"


def _floats(values: torch.Tensor | None, dtype: torch.dtype) -> str:
    narrow = dtype.itemsize == 1  # no random numbers are drawn in float8
    base = "torch.randn({size}{device})" if narrow else ANY_FLOAT
    if values is not None:
        wide = values.to(torch.float64)
        finite = wide[wide.isfinite()]
        if len(finite) < wide.numel() and not bool(wide.isnan().any()) and bool((finite == 0).all()):
            return f'torch.where(torch.rand({{size}}{{device}}) > 0.5, 0.0, float("-inf")).to({dtype})'
        if len(finite) and float(finite.min()) >= 0:
            base = base.replace("randn", "rand")
        size = float(finite.square().mean().sqrt()) if len(finite) else 1.0
        if size > 2 or 0 < size < 0.5:
            base = f"{base} * {size:.1g}"
    return f"({base}).to({dtype})" if narrow else base


def _written(values: torch.Tensor, given: Input) -> str:
    dtype = "" if given.dtype in (torch.bool, torch.int64) else f", dtype={given.dtype}"
    device = "" if given.device == "cpu" else f', device="{given.device}"'
    return f"torch.tensor({values.tolist()}{dtype}{device})"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _bracketed(text: str, wanted: bool) -> str:
    """The expression, in parentheses if a method is called on it and it needs them."""
    return f"({text})" if wanted and (" > " in text.rpartition(")")[2] or " * " in text.rpartition(")")[2]) else text
