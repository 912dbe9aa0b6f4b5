"""How much a product with unaligned sizes must be padded, and what that costs, by the cost model or timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Layout, can_measure, device_model, measured, size_hint
from ..cost.device import precision_of_products, tf32_is_allowed
from ..ir.facts import known
from ..ir.program import Program, Value
from ..ir.traits import is_pointwise
from ..rewrite.rule import Match

ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
"""Elements in 16 bytes."""

UNALIGNED_RATE = 0.5
"""Assumed rate of tensor cores on operands that are loaded element by element, relative to aligned operands."""


@dataclass(frozen=True)
class Padding:
    """How much each of the three sizes of a product grows."""

    m: int = 0
    k: int = 0
    n: int = 0


def needed_padding(m: Match, a: torch.Tensor, b: torch.Tensor) -> Padding:
    alignment = ALIGNMENT[a.dtype]
    sizes = {"m": a.shape[-2], "k": a.shape[-1], "n": b.shape[-1]}
    inner = {"k" if rows_lie_whole(a) else "m", "n" if rows_lie_whole(b) else "k", "n"}
    grows: dict[str, int] = {}
    for name in inner:
        size = sizes[name]
        if known(size % alignment == 0):
            continue
        m.require(isinstance(size, int), "the size {found} is not known to be aligned", found=size)
        grows[name] = -size % alignment
    return Padding(**grows)


def rows_lie_whole(matrix: torch.Tensor) -> bool:
    """Is the last dim the innermost one in memory? If the strides do not decide between the last two dims, it is, as in
    a contiguous tensor."""
    return known(matrix.stride(-1) == 1) or not known(matrix.stride(-2) == 1)


@dataclass(frozen=True)
class Site:
    """A product and its padding, with all sizes as plain numbers."""

    batch: tuple[int, ...]
    m: int
    k: int
    n: int
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    padding: Padding
    free: tuple[bool, bool, bool]
    """Whether padding a, padding b and cutting the result cost nothing."""

    @property
    def bytes(self) -> int:
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return 4 * math.prod(self.batch) * elements * self.dtype.itemsize


def product_site(m: Match, a: Value, b: Value, padding: Padding) -> Site:
    rows, inner, columns = (size_hint(s) for s in (a.shape[-2], a.shape[-1], b.shape[-1]))
    batch = tuple(size_hint(s) for s in a.shape[:-2])
    strides = (tuple(map(size_hint, a.stride)), tuple(map(size_hint, b.stride)))
    free = (_written_padded(m, a.node), _written_padded(m, b.node), _read_through(m.program, m.root.node))
    return Site(batch, rows, inner, columns, strides, a.dtype, a.device, padding, free)


def timed(site: Site) -> tuple[float, float] | None:
    """Seconds without and with padding: the products are timed on the device, the copies are estimated by the model.

    The kernels that copy are not generated yet, and eager's take up to twice as long where rows are not aligned.
    """
    if not can_measure(site.device, site.bytes):
        return None
    before, after = seconds_of(site, "plain", _plain_work), seconds_of(site, "padded", _padded_work)
    return None if before is None or after is None else (before, after + _copies(site))


def _written_padded(m: Match, node: Node) -> bool:
    if m.program.computed_once(node):
        return True
    call = m.program.call(node)
    if call is not None and call.op == "permute" and len(node.users) == 1:
        return _written_padded(m, call.args["self"])
    return call is not None and is_pointwise(call.op) and call.op != "to" and len(node.users) == 1


def _read_through(program: Program, node: Node) -> bool:
    calls = [program.call(user) for user in node.users]
    return all(call is not None and is_pointwise(call.op) for call in calls)


def seconds_of(site: Site, what: str, work: Callable[[Site], Callable[[], Any]]) -> float | None:
    sizes = f"{list(site.batch)} {site.m}x{site.k}x{site.n} {site.strides} {site.dtype}"
    precise = precision_of_products(site.dtype, site.device)
    how = f" {site.padding}" if what == "padded" else ""
    return measured(f"pad_mm {what} {sizes}{precise}{how}", site.device, lambda: work(site))


def operands(site: Site) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (*site.batch, site.m, site.k), (*site.batch, site.k, site.n)
    a, b = (Layout(shape, strides).random(site.dtype, site.device) for shape, strides in zip(shapes, site.strides))
    return a, b


def _plain_work(site: Site) -> Callable[[], Any]:
    a, b = operands(site)
    return lambda: torch.matmul(a, b)


def _padded_work(site: Site) -> Callable[[], Any]:
    (a, b), grow = operands(site), site.padding
    left, right = _pad(a, grow.m, grow.k), _pad(b, grow.k, grow.n)
    return lambda: torch.matmul(left, right)


def _pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if not rows and not columns:
        return matrix
    if rows_lie_whole(matrix):
        return F.pad(matrix, (0, columns, 0, rows))
    return F.pad(matrix.mT, (0, rows, 0, columns)).mT


def modelled(site: Site) -> tuple[float, float]:
    model = device_model(site.device)
    batch, grow = math.prod(site.batch), site.padding
    slow = 1.0 if site.dtype == torch.float32 and not tf32_is_allowed() else UNALIGNED_RATE
    before = model.gemm(site.m, site.n, site.k, site.dtype, batch, slow)
    after = model.gemm(site.m + grow.m, site.n + grow.n, site.k + grow.k, site.dtype, batch)
    return before, after + _copies(site)


def _copies(site: Site) -> float:
    """Modelled seconds for padding the operands and cutting the result, where that costs anything."""
    model, batch, grow = device_model(site.device), math.prod(site.batch), site.padding
    m, k, n = site.m + grow.m, site.k + grow.k, site.n + grow.n
    copied = ((m * k, grow.m or grow.k), (k * n, grow.k or grow.n), (m * n, grow.m or grow.n))
    needed = [elements for (elements, grows), free in zip(copied, site.free) if grows and not free]
    return sum(model.copy(2 * batch * elements * site.dtype.itemsize) for elements in needed)
