"""`pad_mm`: products whose sizes tensor cores cannot load whole are computed on padded operands, where that is quicker.

Rows and columns added to the result are computed from zeros and cut off again: nothing else sees them. Along the summed
dim both operands are padded, so each added term is 0 * 0 = 0, whatever infinities and NaN the operands hold elsewhere;
adding 0 changes no sum but one that is -0.0, which becomes 0.0. The kernel is another one, so sums round otherwise.

Which sizes matter depends on the layout: the inner dim of each operand and of the result, for these are loaded and
stored in pieces of 16 bytes. Whether it pays is measured on the device, copies included, and remembered; where nothing
can be measured, the model of the device answers. Padding costs nothing where an operand is made by a pointwise kernel
that can as well write it padded, or is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import can_measure, device_model, measured, size_hint
from ..ir.facts import known, known_equal
from ..ir.program import Program, Value
from ..ir.traits import is_pointwise
from ..match.pattern import Tensor
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
"""Elements in 16 bytes."""

UNALIGNED_RATE = 0.5
"""What the model takes for the rate of tensor cores on operands that are loaded element by element."""

ALWAYS = {"always": True}


@dataclass(frozen=True)
class Padding:
    """How much each of the three sizes of a product grows."""

    m: int = 0
    k: int = 0
    n: int = 0


@dataclass(frozen=True)
class PadMm(Rule):
    """a @ b -> (pad(a) @ pad(b))[:m, :n], where sizes are not aligned and it is quicker; up to rounding"""

    always: bool = False
    """On every device, whatever it costs: for tests of the rewrite itself."""
    measure: bool = True
    """Ask the device; else, and where there is none, the model of it."""

    exact = False

    def pattern(self, op, a: Tensor, b: Tensor, c: Tensor, beta, alpha):
        return op.any_of(
            op.matmul(a, b),
            op.addmm(c, a, b, beta=beta, alpha=alpha),
            op.baddbmm(c, a, b, beta=beta, alpha=alpha),
        )

    def check(self, m, a, b, c):
        m.applies(m.root.known and a.known and b.known and a.rank == b.rank and a.rank in (2, 3))
        m.applies(a.dtype in ALIGNMENT and (self.always or a.device.type == "cuda"))
        m.applies(a.rank == 2 or known_equal(a.shape[0], b.shape[0]))
        padding = _padding(m, a.tensor, b.tensor)
        m.applies(padding != Padding())
        m.applies(all(not isinstance(s, int) or s > 0 for s in (*a.shape, *b.shape)))
        if c is not None:
            aligned = c.rank <= m.root.rank
            fits = aligned and _is_broadcast(c.shape, m.root.shape)
            m.require(fits, "the bias has another shape", at=c, wanted=m.root.shape, found=c.shape)
        if not self.always:
            site = _site(m, a, b, padding)
            measure = (lambda: _timed(site)) if self.measure else None
            m.pays(*_modelled(site), measure=measure, error=math.inf)  # what kernels there are is not in the model

    def rewrite(self, op, m, a, b, c, beta, alpha):
        padding = _padding(m, a.tensor, b.tensor)
        left = _padded(op, a, padding.m, padding.k)
        right = _padded(op, b, padding.k, padding.n)
        if c is None:
            product = op.matmul(left, right)
        else:
            rows = padding.m if c.rank >= 2 and not known(c.shape[-2] == 1) else 0
            columns = padding.n if c.rank >= 1 and not known(c.shape[-1] == 1) else 0
            given = _padded(op, c, rows, columns)
            how = {name: value for name, value in (("beta", beta), ("alpha", alpha)) if value not in (None, 1)}
            product = getattr(op, m.root.op)(given, left, right, **how)
        return _cut(op, product, m.root, padding)

    examples = [
        fires(lambda a, b: a @ b, "f32[6, 7]", "f32[7, 10]", settings=ALWAYS),
        fires(lambda a, b: torch.mm(a, b.t()), "bf16[8, 9]", "bf16[16, 9]", settings=ALWAYS),
        fires(lambda a, b: torch.mm(a.t(), b) * 2, "f16[8, 9]", "f16[8, 16]", settings=ALWAYS),
        fires(lambda a, b: torch.bmm(a, b), "f32[3, 6, 7]", "f32[3, 7, 10]", settings=ALWAYS),
        fires(lambda a: a[:, :1].expand(a.shape[0], 7).exp() @ torch.ones(7, 10), "f32[6, 8]", settings=ALWAYS,
              dynamic=True),
        fires(lambda a, b: a[:, :7] @ b, "f32[5, 8]", "f32[7, 9]", settings=ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b), "f32[10]", "f32[6, 7]", "f32[7, 10]", settings=ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), "f32[6, 1]", "f32[6, 7]", "f32[7, 10]",
              settings=ALWAYS),
        fires(lambda c, a, b: torch.addmm(c, a.t(), b, beta=0), torch.full((7, 10), math.nan), "f32[8, 7]",
              "f32[8, 10]", settings=ALWAYS),
        fires(lambda c, a, b: torch.baddbmm(c, a, b), "f32[3, 1, 10]", "f32[3, 6, 8]", "f32[3, 8, 10]",
              settings=ALWAYS),
        fires(lambda a, b: a @ b, torch.tensor([[math.inf, 1, 2], [math.nan, -0.0, 0]]), "f32[3, 5]",
              settings=ALWAYS),
        declines(lambda a, b: a @ b, "f32[6, 7]", "f32[7, 10]"),
        declines(lambda a, b: a @ b, "f32[6, 8]", "f32[8, 16]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "f64[6, 7]", "f64[7, 10]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "i64[6, 7]", "i64[7, 10]", settings=ALWAYS, dialects=("aten",)),
        declines(lambda a, b: a @ b, "f32[6, 7]", "f32[7]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "f32[6, 0]", "f32[0, 9]", settings=ALWAYS),
        declines(lambda a, b: a @ b, "f32[6, 7]", "f32[7, 10]", settings=ALWAYS, dynamic=True,
                 because="not known to be aligned"),
    ]  # fmt: skip


@dataclass(frozen=True)
class PadMmPass(Pass):
    """Products whose sizes tensor cores cannot load whole are computed on padded operands, where that is quicker."""

    name = "pad_mm"
    always: bool = False
    """Pad every product that is not aligned, on every device: for tests."""
    measure: bool = True
    """Time both ways on the device; else the model of the device decides."""

    def rules(self) -> Sequence[Rule]:
        return (PadMm(self.always, self.measure),)


# ---- what must grow ----


def _padding(m: Match, a: torch.Tensor, b: torch.Tensor) -> Padding:
    alignment = ALIGNMENT[a.dtype]
    sizes = {"m": a.shape[-2], "k": a.shape[-1], "n": b.shape[-1]}
    inner = {"k" if _rows_lie_whole(a) else "m", "n" if _rows_lie_whole(b) else "k", "n"}
    grows: dict[str, int] = {}
    for name in inner:
        size = sizes[name]
        if known(size % alignment == 0):
            continue
        m.require(isinstance(size, int), "the size {found} is not known to be aligned", found=size)
        grows[name] = -size % alignment
    return Padding(**grows)


def _rows_lie_whole(matrix: torch.Tensor) -> bool:
    """The last dim is the inner one; of two that both could be, the one that is so in a contiguous tensor."""
    return known(matrix.stride(-1) == 1) or not known(matrix.stride(-2) == 1)


def _is_broadcast(shape: Any, full: Any) -> bool:
    pairs = zip(reversed(shape), reversed(full))
    return all(known(size == 1) or known_equal(size, whole) for size, whole in pairs)


# ---- the rewrite ----


def _padded(op: Emitter, value: Value, rows: int, columns: int) -> Value:
    """The value with zeros below and to the right; a padded one that is there already is taken.

    A transposed matrix stays one: its padding would lie in rows, and another of its dims be the inner one.
    """
    if not rows and not columns:
        return value
    if value.tensor is not None and value.rank >= 2 and not _rows_lie_whole(value.tensor):
        swap = [*range(value.rank - 2), value.rank - 1, value.rank - 2]
        return op.permute(_padded(op, _transposed_back(op, value, swap), columns, rows), swap)
    pads = [0, columns, 0, rows] if rows else [0, columns]
    for user in value.node.users:
        call = op.program.call(user)
        if call is not None and call.op == "constant_pad_nd" and user < op.anchor and not call.mutates:
            if call.args == {"self": value.node, "pad": pads}:
                return Value(op.program, user)
    return op.constant_pad_nd(value, pads)


def _transposed_back(op: Emitter, value: Value, swap: list[int]) -> Value:
    call = value.call
    if call is not None and call.op == "permute" and list(call.args["dims"]) == swap:
        return Value(op.program, call.args["self"])
    return op.permute(value, swap)


def _cut(op: Emitter, product: Value, root: Value, padding: Padding) -> Value:
    if not padding.m and not padding.n:
        return product
    if padding.m:
        product = op.slice(product, root.rank - 2, 0, root.shape[-2])
    if padding.n:
        product = op.slice(product, root.rank - 1, 0, root.shape[-1])
    # what uses the result may count on how it lies; a pointwise user reads through this copy
    return op.clone(product, memory_format=torch.contiguous_format)


# ---- what it costs ----


@dataclass(frozen=True)
class _Site:
    """A product and its padding, in numbers."""

    batch: tuple[int, ...]
    m: int
    k: int
    n: int
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    padding: Padding
    free: tuple[bool, bool, bool]
    """Padding a, padding b and cutting the result cost nothing."""

    @property
    def bytes(self) -> int:
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return 4 * math.prod(self.batch) * elements * self.dtype.itemsize


def _site(m: Match, a: Value, b: Value, padding: Padding) -> _Site:
    rows, inner, columns = (size_hint(s) for s in (a.shape[-2], a.shape[-1], b.shape[-1]))
    batch = tuple(size_hint(s) for s in a.shape[:-2])
    strides = (tuple(map(size_hint, a.stride)), tuple(map(size_hint, b.stride)))
    free = (_written_padded(m, a.node), _written_padded(m, b.node), _read_through(m.program, m.root.node))
    return _Site(batch, rows, inner, columns, strides, a.dtype, a.device, padding, free)


def _timed(site: _Site) -> tuple[float, float] | None:
    """Seconds without and with padding, on the device."""
    if not can_measure(site.device, site.bytes):
        return None
    before, after = _ask(site, "plain", _plain_work), _ask(site, "padded", _padded_work)
    return None if before is None or after is None else (before, after)


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


def _ask(site: _Site, what: str, work: Callable[[_Site], Callable[[], Any]]) -> float | None:
    lies = f"{list(site.batch)} {site.m}x{site.k}x{site.n} {site.strides} {site.dtype}"
    precise = f" tf32={torch.backends.cuda.matmul.allow_tf32}" if site.dtype == torch.float32 else ""
    how = "" if what == "plain" else f" {site.padding} free={site.free}"
    return measured(f"pad_mm {what} {lies}{precise}{how}", site.device, lambda: work(site))


def _operands(site: _Site) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (*site.batch, site.m, site.k), (*site.batch, site.k, site.n)
    made = [
        torch.empty_strided(shape, stride, dtype=site.dtype, device=site.device).normal_()
        for shape, stride in zip(shapes, site.strides)
    ]
    return made[0], made[1]


def _plain_work(site: _Site) -> Callable[[], Any]:
    a, b = _operands(site)
    return lambda: torch.matmul(a, b)


def _padded_work(site: _Site) -> Callable[[], Any]:
    a, b = _operands(site)
    grow, (a_free, b_free, cut_free) = site.padding, site.free

    def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        if not rows and not columns:
            return matrix
        if _rows_lie_whole(matrix):
            return F.pad(matrix, (0, columns, 0, rows))
        return F.pad(matrix.mT, (0, rows, 0, columns)).mT

    padded_a, padded_b = pad(a, grow.m, grow.k), pad(b, grow.k, grow.n)

    def work() -> Any:
        left = padded_a if a_free else pad(a, grow.m, grow.k)
        right = padded_b if b_free else pad(b, grow.k, grow.n)
        product = torch.matmul(left, right)
        return product if cut_free or not (grow.m or grow.n) else product[..., : site.m, : site.n].contiguous()

    return work


def _modelled(site: _Site) -> tuple[float, float]:
    model = device_model(site.device)
    batch, grow = math.prod(site.batch), site.padding
    slow = 1.0 if site.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else UNALIGNED_RATE
    m, k, n = site.m + grow.m, site.k + grow.k, site.n + grow.n
    before = model.gemm(site.m, site.n, site.k, site.dtype, batch, slow)
    after = model.gemm(m, n, k, site.dtype, batch)
    copied = ((m * k, grow.m or grow.k), (k * n, grow.k or grow.n), (m * n, grow.m or grow.n))
    for (elements, needed), free in zip(copied, site.free):
        if needed and not free:
            after += model.copy(2 * batch * elements * site.dtype.itemsize)
    return before, after
