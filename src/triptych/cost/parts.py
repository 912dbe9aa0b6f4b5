"""Pieces of work: what a device computes in one call, and on which operands.

A part is a frozen dataclass. Its fields say everything that its time depends on, so that one description gives bytes,
floating-point operations, launches, the modelled time with its error, the work to time on the device, and the question
under which the answer is stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ir.sizes import bytes_of, size_hint
from ..ir.text import dtype_name
from .device import HALF, LAST_STEP, DeviceModel, precision_of_products
from .timing import Run

MODEL_ERROR = 1.5
"""The factor by which the cost model of a device may be wrong about the ratio of two costs."""
UNKNOWN = math.inf
"""The error of a part of which the model does not know the kernel."""


@dataclass(frozen=True)
class Operand:
    """Sizes, strides and dtype of a tensor. Symbolic sizes are the numbers that they had during capture."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Operand:
        assert tensor is not None, "the metadata of a value must be known before its cost is asked"
        return cls(_numbers(tensor.shape), _numbers(tensor.stride()), tensor.dtype)

    @classmethod
    def contiguous(cls, shape: Sequence[Any], dtype: torch.dtype) -> Operand:
        sizes = _numbers(shape)
        return cls(sizes, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes))), dtype)

    @property
    def is_contiguous(self) -> bool:
        return self == Operand.contiguous(self.shape, self.dtype)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the elements in memory: those of an expanded dim are there once."""
        sizes = zip(self.shape, self.strides)
        return self.dtype.itemsize * math.prod(size for size, stride in sizes if stride or not size)

    @property
    def span(self) -> int:
        """Bytes from the first element to the last one."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        return self.dtype.itemsize * (1 + last)

    @property
    def mT(self) -> Operand:
        """The matrix, or each matrix of a batch, transposed."""
        *batch, rows, columns = zip(self.shape, self.strides)
        shape, strides = zip(*batch, columns, rows)
        return Operand(shape, strides, self.dtype)

    def for_each(self, count: int) -> Operand:
        """The tensor expanded over a batch of this size."""
        return Operand((count, *self.shape), (0, *self.strides), self.dtype)

    def random(self, device: torch.device) -> torch.Tensor:
        """A tensor of these sizes and strides; integers are small, conditions true and false."""
        count = self.span // self.dtype.itemsize
        how: dict[str, Any] = {"dtype": self.dtype, "device": device}
        if self.dtype.is_floating_point or self.dtype.is_complex:
            wide = self.dtype if self.dtype.itemsize > 1 else torch.float32
            flat = torch.randn(count, dtype=wide, device=device).to(self.dtype)
        else:
            flat = torch.randint(2, (count,), **how)
        return flat.as_strided(self.shape, self.strides)  # an expanded tensor cannot be filled itself

    def __str__(self) -> str:
        strides = "" if self.is_contiguous else f"/{list(self.strides)}"
        return f"{dtype_name(self.dtype)}{list(self.shape)}{strides}"


class Part:
    """One call on a device."""

    launches: int = 1
    """Kernels that it launches; 0 for work that becomes part of another kernel."""
    through_python: bool = False
    """Is it called by generated code as an operator written in Python, which takes the host longer?"""
    error: float = MODEL_ERROR
    """The factor by which its modelled time may be wrong; `UNKNOWN` if the model does not know its kernel."""
    products: ClassVar[bool] = False
    """Does its time depend on the precision in which the user lets float32 products be computed?"""

    @property
    def bytes(self) -> float:
        """Read and written in memory."""
        return 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations of products."""
        return 0.0

    @property
    def dtype(self) -> torch.dtype:
        """In which the products are computed."""
        return torch.float32

    @property
    def memory(self) -> float:
        """Bytes that timing it takes."""
        return 2 * self.bytes

    def seconds(self, model: DeviceModel) -> float:
        """Modelled seconds on a device, without the launches."""
        return max(self.flops / model.flops(self.dtype), self.bytes / model.bandwidth)

    def modelled(self, model: DeviceModel) -> float:
        """Modelled seconds with the launches."""
        return self.launches * model.launch + self.seconds(model)

    def prepare(self, device: torch.device) -> Run | None:
        """Makes operands and returns the call to time; None if the part cannot be timed by itself."""
        return None

    @property
    def kind(self) -> Any:
        """Parts of one kind are computed by the same kind of kernel, at about the same rate."""
        return type(self)

    def like(self) -> Part:
        """The part that is timed in place of this one: a few sizes stand for all."""
        return self

    def question(self, device: torch.device) -> str:
        """Everything that the time depends on but the device, as text."""
        fields = [field for field in dataclasses.fields(self) if field.repr]  # type: ignore[arg-type]
        values = [(field, getattr(self, field.name)) for field in fields]
        told = [f"{field.name}={_text(value)}" for field, value in values if value != field.default]
        precise = precision_of_products(self.dtype, device) if self.products else ""
        return f"{type(self).__name__}({', '.join(told)}){precise}"


@dataclass(frozen=True)
class Moved(Part):
    """A generated kernel that reads and writes so many bytes, or that much more traffic in one that is there anyway."""

    moved: float
    launches: int = 1
    operands: int = 1
    """Of a cat, which has a slower kernel for many operands."""

    @property
    def bytes(self) -> float:
        return self.moved

    def seconds(self, model: DeviceModel) -> float:
        return model.generated_cat(self.moved, self.operands) - model.launch

    def prepare(self, device: torch.device) -> Run | None:
        if device.type != "cuda" or not self.launches or self.operands > 1:
            return None
        half = max(int(self.moved) // 2, 1)
        source, target = torch.ones(2, half, dtype=torch.uint8, device=device)
        return lambda: target.copy_(source)

    def like(self) -> Part:
        """The time of a copy follows from its bytes, so a power of two stands for all sizes up to it."""
        return dataclasses.replace(self, moved=power_of_two(self.moved))


def read_and_written(*tensors: torch.Tensor, times: float = 1.0, launches: int = 1) -> Moved:
    """A generated kernel that reads or writes each of these tensors once."""
    return Moved(times * sum(map(bytes_of, tensors)), launches)


@dataclass(frozen=True)
class Product(Part):
    """`matmul(left, right)` of a matrix, or of a batch of matrices, by another; or `addmm(added, left, right)`."""

    left: Operand
    right: Operand
    added: Operand | None = None
    rate: float = dataclasses.field(default=1.0, repr=False)
    """The fraction of the usual rate that the model assumes."""
    error: float = dataclasses.field(default=MODEL_ERROR, repr=False)

    products = True

    @classmethod
    def of(cls, left: torch.Tensor | None, right: torch.Tensor | None, added: Any = None, **how: Any) -> Product:
        return cls(Operand.of(left), Operand.of(right), None if added is None else Operand.of(added), **how)

    @classmethod
    def sized(cls, m: int, n: int, k: int, dtype: torch.dtype, batch: int = 1, **how: Any) -> Product:
        """By sizes alone: the right operand is stored transposed, as the weight of a linear layer."""
        many = () if batch == 1 else (batch,)
        right = Operand.contiguous((*many, n, k), dtype).mT
        return cls(Operand.contiguous((*many, m, k), dtype), right, **how)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the batch, rows, columns and inner size."""
        return math.prod(self.left.shape[:-2]), self.left.shape[-2], self.right.shape[-1], self.left.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    @property
    def result_bytes(self) -> int:
        batch, m, n, _ = self.sizes
        return batch * m * n * self.dtype.itemsize

    @property
    def bytes(self) -> float:
        batch, m, n, k = self.sizes
        added = 0 if self.added is None else self.added.bytes
        return batch * (m * k + k * n + m * n) * self.dtype.itemsize + added

    @property
    def flops(self) -> float:
        batch, m, n, k = self.sizes
        return 2.0 * batch * m * n * k

    @property
    def memory(self) -> float:
        return 2 * (self.left.span + self.right.span + self.result_bytes)  # `matmul` may copy its operands

    def seconds(self, model: DeviceModel) -> float:
        batch, m, n, k = self.sizes
        return model.gemm(m, n, k, self.dtype, batch, self.rate) - model.launch + self._adding(model)

    def _adding(self, model: DeviceModel) -> float:
        """On a GPU, one row is added in the epilogue of the product; anything else is first copied into the result,
        which the product then reads."""
        added = self.added
        if added is None:
            return 0.0
        if model.is_gpu and len(added.shape) == 1 and added.shape[0] != 1 and added.strides[0] == 1:
            return added.bytes / model.bandwidth + (0.0 if added.dtype in HALF else LAST_STEP)
        return (added.bytes + 2 * self.result_bytes) / model.bandwidth + (model.launch if model.is_gpu else 0.0)

    def prepare(self, device: torch.device) -> Run:
        a, b = self.left.random(device), self.right.random(device)
        if self.added is None:
            return lambda: torch.matmul(a, b)
        c = self.added.random(device)
        return lambda: torch.addmm(c, a, b)

    @property
    def kind(self) -> Any:
        """Kernels differ by dtype and by the order of the operands; a bias costs nothing in half precision."""
        adds = self.added is not None and (len(self.added.shape) > 1 or self.dtype not in HALF)
        return type(self), self.dtype, _order(self.left), _order(self.right), adds

    def like(self) -> Part:
        """Products that differ in rows only are one question, where the number of rows does not decide which kernels
        exist: the rows of the left operand must not be the innermost dim of it."""
        rows = self.left.shape[-2]
        if rows < 2 or self.left.strides[-1] != 1 or (self.added is not None and len(self.added.shape) > 1):
            return self
        return dataclasses.replace(self, left=_with_rows(self.left, power_of_two(rows)))


def _with_rows(matrix: Operand, rows: int) -> Operand:
    """The same matrix with another number of rows."""
    *batch, old, columns = matrix.shape
    *steps, row, column = matrix.strides
    grown = tuple(step // old * rows if step % old == 0 else step * -(-rows // old) for step in steps)
    return Operand((*batch, rows, columns), (*grown, row, column), matrix.dtype)


@dataclass(frozen=True)
class OperatorCall(Part):
    """An operator as it stands, such as one of our own kernels: the model knows what it moves and multiplies."""

    operator: Any
    operands: tuple[Any, ...]
    """Its arguments; tensors are described by `Operand`, also in lists."""
    does: tuple[Part, ...] = dataclasses.field(default=(), repr=False)
    """Parts whose work it does, for the model: without them that follows from the bytes and operations."""
    produced: float = dataclasses.field(default=0.0, repr=False)
    """Bytes of the results."""
    work: float = dataclasses.field(default=0.0, repr=False)
    """Floating-point operations of its products."""
    precision: torch.dtype = dataclasses.field(default=torch.float32, repr=False)
    rate: float = dataclasses.field(default=1.0, repr=False)
    """The fractions of the model's rates that it is assumed to reach."""
    least: float = dataclasses.field(default=0.0, repr=False)
    """Seconds that it takes however small the operands are."""
    error: float = dataclasses.field(default=MODEL_ERROR, repr=False)
    launches: int = dataclasses.field(default=1, repr=False)
    through_python: bool = dataclasses.field(default=False, repr=False)

    products = True

    @property
    def bytes(self) -> float:
        if self.does:
            return sum(part.bytes for part in self.does)
        return self.produced + sum(operand.bytes for operand in _operands(self.operands))

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.does) if self.does else self.work

    @property
    def dtype(self) -> torch.dtype:
        return self.precision

    @property
    def memory(self) -> float:
        return 2 * (self.bytes + sum(operand.span for operand in _operands(self.operands)))

    def seconds(self, model: DeviceModel) -> float:
        busy = sum(part.seconds(model) for part in self.does) if self.does else super().seconds(model)
        return max(self.least, busy / self.rate)

    def prepare(self, device: torch.device) -> Run:
        arguments = _random(self.operands, device)
        return lambda: self.operator(*arguments)

    @property
    def kind(self) -> Any:
        return type(self), self.operator


@dataclass(frozen=True)
class Waiting(Part):
    """Seconds in which the device computes nothing else, such as updates of one element that wait for each other."""

    waiting: float
    launches: int = 0

    def seconds(self, model: DeviceModel) -> float:
        return self.waiting


def power_of_two(size: float) -> int:
    """The next power of two."""
    return 1 << max(math.ceil(size) - 1, 0).bit_length()


def _order(matrix: Operand) -> str:
    by_rows, by_columns = matrix.strides[-1] == 1, matrix.strides[-2] == 1
    return "rows" if by_rows else "columns" if by_columns else "strided"


def _operands(values: Any) -> list[Operand]:
    if isinstance(values, Operand):
        return [values]
    return [o for value in values for o in _operands(value)] if isinstance(values, (tuple, list)) else []


def _random(values: Any, device: torch.device) -> Any:
    if isinstance(values, Operand):
        return values.random(device)
    if isinstance(values, (tuple, list)):
        return [_random(value, device) for value in values]
    return values


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(size_hint, sizes))


