"""Costs whose products and copies are timed on the device, for decisions of which the cost model is not sure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..ir.sizes import size_hint
from .decision import Decision
from .device import DeviceModel, device_model, precision_of_products
from .measure import can_measure, measured
from .old import decide
from .timing import Run as Work

Costs = Callable[[DeviceModel], tuple[float, float]]
"""Seconds of the old and of the new form on a device, added up from its products, its copies and its launches."""


def require_gain(
    m: Any, device: torch.device, costs: Costs, *, sure: bool = False, saves: int = 0, by_name: bool = False
) -> None:
    """Leave this site alone unless the new form is faster. `sure`, `saves` and `by_name` are those of `Match.pays`."""
    m.accept(decision(device, costs, m.program.options.tune, sure=sure, saves=saves, by_name=by_name))


def decision(
    device: torch.device, costs: Costs, tune: str, *, sure: bool = False, saves: int = 0, by_name: bool = False
) -> Decision:
    """Which form is faster? Where the cost model is not sure, the products and copies that the costs consist of are
    timed on the device."""
    before, after = costs(device_model(device))
    measure = functools.partial(timed, device, costs)
    return decide(before, after, tune, sure=sure, saves=saves, by_name=by_name, measure=measure)


def timed(device: torch.device, costs: Costs) -> tuple[float, float] | None:
    """The costs with products and copies timed on the device; None if one of them cannot be timed."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    try:
        return costs(TimedModel(**asdict(device_model(device)), device=device))
    except NotTimed:
        return None


class NotTimed(Exception):
    """A piece of work cannot be timed: there is no GPU, too little memory, or no kernel for it."""


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of a matrix, or of a batch of matrices."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(_numbers(tensor.shape), _numbers(tensor.stride()))

    def bytes(self, dtype: torch.dtype) -> int:
        """From the first element to the last one."""
        if 0 in self.shape:
            return 0
        return dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)))

    def random(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        elements = torch.randn(self.bytes(dtype) // dtype.itemsize, dtype=dtype, device=device)
        return elements.as_strided(self.shape, self.strides)  # an expanded tensor cannot be filled itself

    def __str__(self) -> str:
        return f"{list(self.shape)}{list(self.strides)}"


@dataclass(frozen=True, kw_only=True)
class TimedModel(DeviceModel):
    """A device whose products and copies are timed at their real sizes. A launch is work of the host, so its cost stays
    that of the model."""

    device: torch.device

    def gemm(self, m: int, n: int, k: int, dtype: torch.dtype, batch: int = 1, rate: float = 1.0) -> float:
        left = Layout((batch, m, k), (m * k, k, 1))
        right = Layout((batch, k, n), (k * n, 1, k))  # as the weight of a linear layer, which is stored transposed
        if batch == 1:
            left, right = (Layout(one.shape[1:], one.strides[1:]) for one in (left, right))
        return self.launch + self._product(left, right, dtype) / rate

    def product(self, left: torch.Tensor, right: torch.Tensor) -> float:
        return self.launch + self._product(Layout.of(left), Layout.of(right), left.dtype)

    def addmm(self, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
        return self.launch + self._product(Layout.of(left), Layout.of(right), left.dtype, Layout.of(added))

    def copy(self, moved: float) -> float:
        half = max(int(moved) // 2, 1)

        def prepare() -> Work:
            source, target = torch.ones(2, half, dtype=torch.uint8, device=self.device)
            return lambda: target.copy_(source)

        return self.launch + self._seconds(f"copy of {half} bytes", 2 * half, prepare)

    def _product(self, left: Layout, right: Layout, dtype: torch.dtype, added: Layout | None = None) -> float:
        def prepare() -> Work:
            a, b = (layout.random(dtype, self.device) for layout in (left, right))
            if added is None:
                return lambda: torch.matmul(a, b)
            c = added.random(dtype, self.device)
            return lambda: torch.addmm(c, a, b)

        plus = "" if added is None else f" plus {added}"
        precise = precision_of_products(dtype, self.device)
        result = math.prod(left.shape[:-1]) * right.shape[-1] * dtype.itemsize
        needed = 2 * (left.bytes(dtype) + right.bytes(dtype) + result)  # `matmul` may copy its operands
        return self._seconds(f"product {left} {right}{plus} {dtype}{precise}", needed, prepare)

    def _seconds(self, question: str, needed: int, prepare: Callable[[], Work]) -> float:
        seconds = measured(question, self.device, prepare) if can_measure(self.device, needed) else None
        if seconds is None:
            raise NotTimed(question)
        return seconds


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(size_hint, sizes))
