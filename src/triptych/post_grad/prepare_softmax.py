"""`prepare_softmax`: computes maximum and sum of exponentials of a long row in one pass, so that it is read once less.

A softmax reads each row for its maximum, for its sum, and for its result. Rows that fit into the cache of the GPU are
read from memory once, however many passes there are. Longer ones, such as float32 logits of a vocabulary, are read from
memory in each pass. A pass that keeps a running maximum and rescales the sum saves one of them, but computes two
exponentials per element: for rows of 16-bit numbers, that takes longer than to read them twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..cost import DeviceModel, Part, Work, device_model, read_and_written, size_hint
from ..ir.facts import tensor_of
from ..ir.program import Value
from ..ir.readers import readers
from ..ir.sizes import elements
from ..match.pattern import Tensor
from ..rewrite.edits import ReplaceAll
from ..rewrite.examples import declines, fires
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule

CACHE = 50e6
"""Bytes in the cache that all cores of a GPU share."""
ROWS_A_CORE = 4
"""Rows that a core works on at once."""
CACHED_ROWS_A_CORE = 2
"""Rows of a core, out of those that it works on at once, that are still in the cache in the second pass. Fitted to the
times below."""
TWO_PASSES, ONE_PASS = 125e-12, 178e-12
"""Seconds that one core computes per element, if memory does not slow it down. Measured on an H200 for cross entropy:
bf16[4096, 50304] 232 us in two passes and 289 us in one, bf16[8192, 32000] 235 and 374 us, f32[8192, 32000] 316 and
371 us; memory decides for f32[4096, 50304], 344 and 287 us."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}
ALWAYS: dict[str, Any] = {"settings": {"always": True}, **ATEN}


def _softmax(x: Any, dim: int) -> Any:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def _log_softmax(x: Any, dim: int) -> Any:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _with_infinities() -> Any:
    inf = torch.inf
    return torch.tensor([[inf, 0.0, 1.0], [-inf, -inf, -inf], [torch.nan, 1.0, -inf], [-inf, 2.0, -0.0]])


@dataclass(frozen=True)
class PrepareSoftmax(Rule):
    """m = amax(x, d), s = sum(exp(x - m), d) -> m, s in one pass over x; up to rounding

    Where m is infinite, x - m contains a NaN, so s is NaN; the single pass counts such elements as exp(0) instead.
    Adding m - m, which is 0 or NaN, corrects that.
    """

    always: bool = False
    """Rewrite on every device and without asking the cost model: for tests of the rewrite itself."""

    exact = False
    interior_may_be_used = True

    def pattern(self, op, x: Tensor, dims):
        largest = op.amax(x, dims, keepdim=True)
        return op.sum(op.exp(op.sub(x, largest)), dims, keepdim=True)

    def check(self, m, x, dims):
        m.applies(m.root.known and x.known and x.is_float and len(dims) == 1)
        m.applies(self.always or (x.device.type == "cuda" and m.program.options.codegen == "inductor"))
        if not self.always:
            rows = size_hint(m.root.tensor.numel())
            enough = rows >= ROWS_A_CORE * device_model(x.device).cores
            m.require(
                enough, "with {found} rows, each row is split over several cores and takes two passes", found=rows
            )
            m.pays(_in_passes(m, x, dims[0], 2), _in_passes(m, x, dims[0], 1))

    def rewrite(self, op, m, x, dims):
        maximum = _made_by(m, "amax")
        first = op.at(maximum)
        both = first.call(_private.prepare_softmax_online, x, dims[0])
        largest, total = first.getitem(both, 0), first.getitem(both, 1)
        corrected = op.add(total, op.sub(largest, largest))
        return ReplaceAll(
            [
                Replacement((maximum,), (largest,), first, (maximum,), self),
                Replacement((m.root.node,), (corrected,), op, m.nodes, self),
            ],
            is_one=True,
        )

    examples = [
        fires(lambda x: _softmax(x, 1), "f32[4, 6]", **ALWAYS),
        fires(lambda x: _log_softmax(x, -1), "f64[2, 3, 5]", **ALWAYS),
        fires(lambda x: _softmax(x, 0), "f32[4, 6]", dynamic=True, **ALWAYS),
        fires(lambda x: (x - x.amax(1, True)).exp().sum(1, True), _with_infinities(), **ALWAYS),
        fires(lambda x: _softmax(x, 1), _with_infinities(), **ALWAYS),
        declines(lambda x: _softmax(x, 1), "f32[4, 6]", **ATEN),
        declines(lambda x: (x - x.amax(1, True)).exp().sum(0, True), "f32[4, 6]", **ALWAYS),
        declines(lambda x: (x - x.amin(1, True)).exp().sum(1, True), "f32[4, 6]", **ALWAYS),
        declines(lambda x: (x - x.amax((0, 1), True)).exp().sum((0, 1), True), "f32[4, 6]", **ALWAYS),
        declines(lambda x, y: (y - x.amax(1, True)).exp().sum(1, True), "f32[4, 6]", "f32[4, 6]", **ALWAYS),
    ]  # fmt: skip


def _made_by(m: Match, op: str) -> Node:
    return next(node for node in m.nodes if (call := m.program.call(node)) is not None and call.op == op)


@dataclass(frozen=True)
class Statistics(Part):
    """Maximum and sum of exponentials of each row, in one or two passes."""

    rows: int
    row: int
    """Elements of a row."""
    itemsize: int
    passes: int

    @property
    def bytes(self) -> float:
        return self.passes * self.rows * self.row * self.itemsize

    def seconds(self, model: DeviceModel) -> float:
        is_cached = self.row * self.itemsize * model.cores * CACHED_ROWS_A_CORE < CACHE
        from_memory = self.bytes / self.passes if is_cached else self.bytes
        computing = ONE_PASS if self.passes == 1 else TWO_PASSES
        return max(from_memory / model.bandwidth, self.rows * self.row * computing / model.cores)


def _in_passes(m: Match, x: Value, dim: int, passes: int) -> Work:
    """Both statistics, and the pass that computes the result from the row, which is the same in both ways."""
    value, row = _read_from_memory(m, x.node), size_hint(x.shape[dim])
    statistics = Statistics(elements(x.shape) // max(row, 1), row, value.dtype.itemsize, passes)
    is_read_again = any(reader is not m.root.node for reader in readers(m.program, _made_by(m, "exp")))
    later = [read_and_written(value, times=2, launches=0)] if is_read_again else []
    return Work.of(value.device, statistics, later)


def _read_from_memory(m: Match, x: Node) -> torch.Tensor:
    """The operand as it is in memory: generated code casts while it reads."""
    value = tensor_of(x)
    while (call := m.program.call(x)) is not None and call.op == "to":
        x = call.args["self"]
        if tensor_of(x).device != value.device:
            break
        value = tensor_of(x)
    return value
