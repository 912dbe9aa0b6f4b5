"""What a product of int8 matrices and its scaling cost, in two kernels and in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import can_measure, device_model, measured, size_hint
from ..ir.facts import tensor_of
from ..kernels.capture import is_launched
from ..kernels.int_mm_mul import NAME_OF
from ..rewrite.rule import Match
from .neighbours import read_by_pointwise

RATE = 0.7
"""Assumed rate of our kernel, relative to the library's."""


@dataclass(frozen=True)
class Site:
    rows: int
    inner: int
    columns: int
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    scales: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """The shape and the dtype of each scale."""
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    numbers: int
    """How many of the scales are numbers, which must be written to memory first."""
    is_merged: bool
    """The kernels that read the scaled matrix would scale the product themselves."""
    call: float
    """The least time that a call of the operator takes the host; 0 if generated code launches the kernel."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def matrices(self) -> int:
        """The bytes of the scales that are matrices."""
        sizes = [(math.prod(shape), dtype.itemsize) for shape, dtype in self.scales]
        return sum(size * itemsize for size, itemsize in sizes if size == self.elements)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = (self.rows, self.inner), (self.inner, self.columns)
        a, b = (
            torch.empty_strided(shape, stride, dtype=torch.int8, device=self.device).random_(-128, 128)
            for shape, stride in zip(shapes, self.strides)
        )
        return a, b


def site_of(
    m: Match, a: torch.Tensor, b: torch.Tensor, scales: Sequence[Node | float], dtypes: Sequence[torch.dtype]
) -> Site:
    number = torch.empty((), dtype=torch.float32)
    tensors = [tensor_of(scale) if isinstance(scale, Node) else number for scale in scales]
    is_quick = m.program.options.cuda_graphs or is_launched(m.program.options, [a, b, *tensors])
    return Site(
        rows=size_hint(a.shape[0]),
        inner=size_hint(a.shape[1]),
        columns=size_hint(b.shape[1]),
        strides=(tuple(map(size_hint, a.stride())), tuple(map(size_hint, b.stride()))),
        scales=tuple((tuple(map(size_hint, t.shape)), t.dtype) for t in tensors),
        dtypes=tuple(dtypes),
        device=a.device,
        numbers=sum(not isinstance(scale, Node) for scale in scales),
        is_merged=read_by_pointwise(m.program, m.root.node),
        call=0.0 if is_quick else device_model(a.device).operator,
    )


def modelled(site: Site) -> tuple[float, float]:
    """Seconds of both forms; the result of a product counts as one byte for each element there."""
    model, sizes = device_model(site.device), (site.rows, site.columns, site.inner, torch.int8)
    product = model.gemm(*sizes) + 3 * site.elements / model.bandwidth
    fused = model.gemm(*sizes, rate=RATE) + (site.dtypes[-1].itemsize - 1) * site.elements / model.bandwidth
    return _with_reads(site, product, fused)


def timed(site: Site) -> tuple[float, float] | None:
    """Seconds of both forms, with the product and our kernel timed on the device."""
    needed = (site.rows + site.columns) * site.inner + 8 * site.elements + site.matrices
    if not can_measure(site.device, needed):
        return None
    sizes = f"{site.rows}x{site.inner}x{site.columns} {site.strides}"
    product = measured(f"int_mm {sizes}", site.device, lambda: _product(site))
    fused = measured(f"int_mm_mul {sizes} {site.scales} {site.dtypes}", site.device, lambda: _fused(site))
    return None if product is None or fused is None else _with_reads(site, product, fused)


def _with_reads(site: Site, product: float, fused: float) -> tuple[float, float]:
    """Adds what reads the product, or the scaled matrix: a kernel that is not generated yet, so it is modelled."""
    model = device_model(site.device)
    read, written = 4 * site.elements + site.matrices, site.dtypes[-1].itemsize * site.elements
    fused += site.numbers * model.launch
    if site.is_merged:
        product, fused = product + read / model.bandwidth, fused + written / model.bandwidth
    else:
        product += model.copy(read + written)
    return product, max(fused, site.call)


def _product(site: Site) -> Callable[[], Any]:
    a, b = site.operands()
    return lambda: torch.ops.aten._int_mm(a, b)


def _fused(site: Site) -> Callable[[], Any]:
    a, b = site.operands()
    scales = [torch.rand(shape, device=site.device).to(dtype) for shape, dtype in site.scales]
    dtypes = [NAME_OF[dtype] for dtype in site.dtypes]
    return lambda: torch.ops.triptych.int_mm_mul(a, b, scales, dtypes)
