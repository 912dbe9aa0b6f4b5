"""`reduced_atomic_contention`: additions to a few rows go to several copies of the rows, which are then summed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import bytes_of, can_measure, device_model, measured, measuring_allowed, size_hint
from ..cost.timing import Work
from ..ir.facts import is_static, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.values import knowledge
from ..rewrite.examples import declines, fires
from ..rewrite.iota import iota
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten

MASKED = "_unsafe_masked_index_put_accumulate"
"""The operator that computes the gradient of an embedding: additions to rows, except to the padding row."""
MOST_COPIES = 64
ATOMIC = 3e-9
"""Seconds between two consecutive atomic additions to the same address."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

ALWAYS: dict[str, Any] = {"dialects": ("aten",), "settings": {"copies": 4}}
ROWS = ("f32[3, 5]", torch.tensor([2, 0, 0, -1, 2, 2, 0]), "f32[7, 5]")


@dataclass(frozen=True)
class _Additions:
    """index_put(target, [index], values, accumulate=True), with or without a mask."""

    target: Node
    index: Node
    values: Node
    mask: Node | None

    @property
    def rows(self) -> int:
        return size_hint(tensor_of(self.target).shape[0])

    @property
    def count(self) -> int:
        """How many rows are added."""
        return math.prod(map(size_hint, tensor_of(self.index).shape))

    @property
    def width(self) -> int:
        return math.prod(map(size_hint, tensor_of(self.target).shape[1:]))


def _read(program: Program, node: Node) -> _Additions | None:
    call = program.call(node)
    if call is None or call.mutates or call.op not in ("index_put", MASKED):
        return None
    if call.op == "index_put" and call.args.get("accumulate") is not True:
        return None
    indices = call.args["indices"]
    index = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    values, target = tensor_fact(call.args["values"]), tensor_fact(call.args["self"])
    if not isinstance(index, Node) or values is None or target is None or target.dim() == 0:
        return None
    kind = tensor_fact(index)
    if kind is None or kind.dtype not in (torch.int64, torch.int32) or target.dtype not in DTYPES:
        return None
    return _Additions(call.args["self"], index, call.args["values"], call.args.get("mask"))


@dataclass(frozen=True)
class SpreadAdditions(Rule):
    """index_put(t, [i], v, accumulate=True) -> t + sum(index_put(zeros(P, ...), [turn, i], v, True)); up to rounding

    Threads that add to the same number wait for each other. Where many rows are added to a few, as in the gradient of
    an embedding of types or positions, each is added to one of P copies of these rows, in turn. The order of additions
    changes, which on a GPU is undefined anyway. In a row of `t` to which nothing is added, -0.0 becomes 0.0.
    """

    copies: int = 0
    """Number of copies, on any device and whatever the cost; 0: on a GPU only, and only where a measurement or the cost
    model says that it pays."""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of("index_put", MASKED):
            if not node._erased and (additions := _read(program, node)) is not None and self._may_wait(program, node):
                yield Match.at(program, node, additions=additions)

    def _may_wait(self, program: Program, node: Node) -> bool:
        if self.copies:
            return True
        if not measuring_allowed():  # the user wants deterministic results: rows are sorted then, and no thread waits
            return False
        return tensor_of(node).device.type == "cuda" and program.options.codegen == "inductor"

    def check(self, m, additions):
        target = tensor_of(additions.target)
        m.require(is_static(target.shape), "the number of rows is not known")
        m.require(is_static(tensor_of(additions.index).shape), "the number of additions is not known")
        if not self.copies:
            copies = _copies(additions)
            m.require(copies > 1, "{found} additions to {at} are too few per row", found=additions.count, at=m.node)
            m.pays(*_modelled(additions, copies), measure=lambda: _timed(additions, copies), error=math.inf)

    def rewrite(self, op, m, additions):
        target, index = tensor_of(additions.target), tensor_of(additions.index)
        copies = self.copies or _copies(additions)
        turn = op.remainder(iota(op, additions.count, target.device), copies)
        turn = op.reshape(turn, list(index.shape))
        whole = op.full([copies, *target.shape], 0.0, dtype=target.dtype, device=target.device)
        where, values = [turn, m.program.value(additions.index)], m.program.value(additions.values)
        if additions.mask is None:
            spread = op.index_put(whole, where, values, accumulate=True)
        else:
            mask = m.program.value(additions.mask)
            spread = op.call(aten._unsafe_masked_index_put_accumulate.default, whole, mask, where, values)
        total = op.sum(spread, [0])
        is_zero = knowledge(m.program).number(additions.target) == 0
        return total if is_zero else op.add(m.program.value(additions.target), total)

    examples = [
        fires(lambda t, i, v: torch.index_put(t, [i], v, accumulate=True), *ROWS, **ALWAYS),
        fires(lambda t, i, v: torch.index_put(torch.zeros(3, 5), [i], v, accumulate=True), *ROWS, **ALWAYS),
        fires(lambda t, i, v: torch.index_put(t, [i.view(7, 1)], v[:, None], accumulate=True), *ROWS, **ALWAYS),
        fires(lambda t, i, v: torch.index_put(t, [i[:0]], v[:0], accumulate=True), *ROWS, **ALWAYS),
        fires(lambda t, i, v: torch.index_put(t, [i], v[0], accumulate=True), *ROWS, **ALWAYS),
        fires(lambda t, i, v: aten._unsafe_masked_index_put_accumulate(t, v[:, :1] > 0, [i], v), *ROWS, **ALWAYS),
        declines(lambda t, i, v: torch.index_put(t, [i], v, accumulate=True), *ROWS, dialects=("aten",)),
        declines(lambda t, i, v: torch.index_put(t, [i], v), *ROWS, **ALWAYS),
        declines(lambda t, i, v: torch.index_put(t.long(), [i], v.long(), accumulate=True), *ROWS, **ALWAYS),
        declines(lambda t, i, v: torch.index_put(t, [i, i], v[:, 0], accumulate=True), *ROWS, **ALWAYS),
        declines(lambda t, i, v: torch.index_put(t, [v[:3, 0] > 0], v[0], accumulate=True), *ROWS, **ALWAYS),
    ]  # fmt: skip


# ---- what it costs ----


def _copies(additions: _Additions) -> int:
    """The largest power of two, up to MOST_COPIES, with which all copies together have no more rows than are added."""
    most = min(MOST_COPIES, additions.count // additions.rows) if additions.rows else 1
    return 1 << max(most, 1).bit_length() - 1


def _modelled(additions: _Additions, copies: int) -> tuple[float, float]:
    target = tensor_of(additions.target)
    model = device_model(target.device)
    read = additions.count * additions.width * target.dtype.itemsize / model.bandwidth
    waiting = ATOMIC * additions.count / additions.rows
    summed = model.copy((copies + 1) * bytes_of(target))
    return model.launch + max(read, waiting), model.launch + max(read, waiting / copies) + summed


def _timed(additions: _Additions, copies: int) -> tuple[float, float] | None:
    """Measured seconds without copies and with them.

    Times `index_add_`, whose kernel adds in the same way as generated code, with row indices drawn uniformly.
    """
    target = tensor_of(additions.target)
    if not can_measure(target.device, 4 * additions.count * additions.width * target.dtype.itemsize):
        return None
    sizes = f"{additions.count} rows of {additions.width} to {additions.rows} {target.dtype}"
    before = measured(f"additions {sizes}", target.device, lambda: _added(additions, 1))
    after = measured(f"additions {sizes} in {copies} copies", target.device, lambda: _added(additions, copies))
    return None if before is None or after is None else (before, after)


def _added(additions: _Additions, copies: int) -> Work:
    target = tensor_of(additions.target)
    how: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    index = torch.randint(copies * additions.rows, (additions.count,), device=target.device)
    values = torch.ones(additions.count, additions.width, **how)

    def work() -> torch.Tensor:
        sums = torch.zeros(copies, additions.rows, additions.width, **how)
        sums.view(copies * additions.rows, additions.width).index_add_(0, index, values)
        return sums if copies == 1 else sums.sum(0)

    return work


@dataclass(frozen=True)
class ReducedAtomicContention(Pass):
    """Spreads additions of many rows to a few, such as the gradient of a small embedding, over copies of these rows,
    and sums the copies: threads wait less for each other."""

    copies: int = 0
    """Number of copies, on any device and whatever the cost; 0: on a GPU only, and only where a measurement or the cost
    model says that it pays."""

    name = "reduced_atomic_contention"

    def rules(self) -> Sequence[Rule]:
        return (SpreadAdditions(self.copies),)
