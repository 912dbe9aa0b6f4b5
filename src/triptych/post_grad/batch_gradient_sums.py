"""`batch_gradient_sums`: gradients that are sums over many rows, those of biases and norms, end in few kernels.

Inductor computes a sum of many rows in two kernels, as a split reduction: partial sums, and the sum of these. A
backward graph has such a sum for each bias and for each weight of a norm, and most of these kernels are tiny.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import bytes_of, can_measure, device_model, measured
from ..cost.timing import Work
from ..ir.facts import tensor_of
from ..ir.program import Program
from ..kernels.sum_rows import MOST
from ..rewrite.emit import Emitter
from ..rewrite.examples import declines, fires, mark_as_gradients
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .gradient_sums import GradientSum, gradient_sums, is_in_memory

SUM_ROWS = torch.ops.triptych.sum_rows.default
ROWS_OF_A_PART = 128
"""Rows per partial sum: as many as in Inductor's own split reductions. For 64 rows or fewer, Inductor generates a
persistent reduction, which took at least twice as long on an H200."""
MOST_PARTS = 128
ENOUGH_RESULTS = 64
"""Per core of a GPU: Inductor does not split a reduction that has at least so many results."""
MOST_BYTES = 64 << 20
"""What the sums of one launch read. All of it stays in memory until the last operand has been computed; about this
much fits into the L2 cache of a GPU."""
TILE = 32
"""Columns that one program of the kernel adds up."""

ON_CPU: dict[str, Any] = {"dialects": ("aten",), "prepare": mark_as_gradients, "settings": {"device": "cpu"}}


@dataclass(frozen=True)
class SumRowsTogether(Rule):
    """sum(x, 0), sum(y, 0) -> triptych::sum_rows([x, y]), for x and y that are in memory anyway; up to rounding

    One kernel adds up the rows of several matrices, in place of a kernel for the partial sums of each.
    """

    device: str = "cuda"

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        groups: dict[Any, list[list[GradientSum]]] = {}
        for one, _ in _split_sums(program, self.device):
            if is_in_memory(program, one.x):
                x = tensor_of(one.x)
                same = groups.setdefault((x.device, x.dtype, one.dtypes, one.rows), [[]])
                if len(same[-1]) == MOST or sum(s.bytes for s in same[-1]) + one.bytes > MOST_BYTES:
                    same.append([])
                same[-1].append(one)
        for sums in (sums for same in groups.values() for sums in same if sums):
            yield _site(program, sums, before=sums[-1].node)  # where the operands of all of them have been computed

    def check(self, m, sums):
        m.require(len(sums) > 1, "no other gradient is such a sum of these rows")
        _require_quicker(m, sums)
        model, moved = device_model(tensor_of(sums[0].x).device), sum(s.bytes for s in sums)
        busy = min(1.0, sum(math.ceil(s.columns / TILE) for s in sums) / model.cores)
        m.pays(sum(model.copy(s.bytes) for s in sums), model.copy(moved / busy))

    def rewrite(self, op, m, sums):
        matrices = [op.reshape(s.x, [s.rows, s.columns]) if tensor_of(s.x).dim() > 2 else s.x for s in sums]
        return _results(op, m, sums, matrices)

    examples = [
        fires(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        fires(
            lambda x, y, w: (lambda z: (z.sum(0, keepdim=True), (y @ w).sum([0, 1]), z @ w))((x @ w).relu()),
            "bf16[1024, 8]", "bf16[8, 128, 8]", "bf16[8, 8]", **ON_CPU,
        ),
        fires(lambda x, y: (*x.sum(0).split([4, 4]), y.sum(0).view(4, 4)), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sin()), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU, because="no other"),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[2048, 8]", **ON_CPU, because="no other"),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "bf16[1024, 8]", **ON_CPU, because="no other"),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[64, 8]", "f32[64, 16]", **ON_CPU),
        declines(lambda x, y: (x.sin().sum(0), y.cos().sum(0)), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", dialects=("aten",),
                 prepare=mark_as_gradients),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", dialects=("aten",),
                 settings={"device": "cpu"}),
    ]  # fmt: skip


@dataclass(frozen=True)
class BatchGradientSums(Rule):
    """sum(x, 0), sum(y, 0) -> triptych::sum_rows([parts of x summed, parts of y summed]); up to rounding

    The partial sums are computed as before, fused with what computes x and y. One kernel then adds up those of many
    gradients, in place of one for each.
    """

    device: str = "cuda"

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        groups: dict[Any, list[GradientSum]] = {}
        for one, parts in _split_sums(program, self.device):
            groups.setdefault((tensor_of(one.x).device, one.dtypes, parts), []).append(one)
        for (_, _, parts), sums in groups.items():
            yield _site(program, sums, before=program.graph.output_node(), parts=parts)

    def check(self, m, sums, parts):
        m.require(len(sums) > 1, "no other gradient is such a sum")
        _require_quicker(m, sums)
        model = device_model(tensor_of(sums[0].x).device)
        ends = [parts * s.columns * torch.float32.itemsize + bytes_of(tensor_of(s.result)) for s in sums]
        launches = math.ceil(len(sums) / MOST)
        m.pays(sum(map(model.copy, ends)), launches * model.copy(sum(ends) / launches), sure=True)

    def rewrite(self, op, m, sums, parts):
        begun = []
        for s in sums:  # where the sum stands: what it reads may not be needed any longer
            there = op.at(s.node)
            rows = there.reshape(s.x, [parts, s.rows // parts, s.columns])
            how = {} if tensor_of(s.x).dtype == torch.float32 else {"dtype": torch.float32}
            begun.append(there.sum(rows, [1], **how))
        return _results(op, m, sums, begun)

    examples = [
        fires(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        fires(lambda x, y: (x.sum(0, keepdim=True), y.sum([0, 1])), "bf16[1024, 8]", "bf16[8, 128, 16]", **ON_CPU),
        fires(lambda x, y: (x.sum(0).bfloat16(), y.sum(0)), "f32[1024, 8]", "bf16[1024, 8]", **ON_CPU),
        fires(lambda x, y: (x.sum(0).view(2, 4), y.sum(0), x @ x.t()), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        fires(lambda x, y: (*x.sum(0).split([4, 4]), y.sum(0)[:2]), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sin()), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU, because="no other"),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", dialects=("aten",),
                 prepare=mark_as_gradients),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", dialects=("aten",),
                 settings={"device": "cpu"}),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f64[1024, 8]", "f64[1024, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[64, 8]", "f32[64, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1031, 8]", "f32[1031, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 64]", "f32[1256, 4]", **ON_CPU),
        declines(lambda x, y: (x.sum(1), y.sum(1)), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        declines(lambda x, y: (x.sum(0).sin(), y.sum(0).cos()), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU),
        declines(lambda x, y: (x.t().sum(0), y.t().sum(0)), "f32[8, 1024]", "f32[16, 1024]", **ON_CPU),
        declines(lambda x, y: (x.sum(0), y.sum(0)), "f32[1024, 8]", "f32[1024, 16]", **ON_CPU, dynamic=True),
    ]  # fmt: skip


def _site(program: Program, sums: list[GradientSum], before: Node, **found: Any) -> Match:
    return Match.at(
        program, *(node for s in sums for node in s.returned), before=before,
        covers=[node for s in sums for node in (*s.chain, *s.views)], sums=sums, **found,
    )  # fmt: skip


def _results(op: Emitter, m: Match, sums: Sequence[GradientSum], matrices: Sequence[Any]) -> tuple[Node, ...]:
    """The gradients that the sums of these matrices are, and their views."""
    made = op.call(SUM_ROWS, list(matrices), *sums[0].rounding)
    gradients: dict[Node, Any] = {}
    for i, s in enumerate(sums):
        gradient, shape = op.getitem(made, i), list(tensor_of(s.result).shape)
        gradients[s.result] = (gradient if len(shape) == 1 else op.reshape(gradient, shape)).node
        for view in s.views:
            gradients[view] = op.again(view, gradients).node
    return tuple(gradients[root.node] for root in m.roots)


def parts_of(rows: int) -> int | None:
    """The number of partial sums for this many rows; None if the rows are few or cannot be divided evenly."""
    ideal = min(rows // ROWS_OF_A_PART, MOST_PARTS)
    fitting = [p for p in range(max(ideal // 2, 2), 2 * ideal) if rows % p == 0 and rows // p > ROWS_OF_A_PART // 2]
    return min(fitting, key=lambda parts: abs(math.log(parts / ideal)), default=None)


def _split_sums(program: Program, device: str) -> Iterator[tuple[GradientSum, int]]:
    """The gradients that Inductor would compute as split reductions, with the number of partial sums of each."""
    for one in gradient_sums(program, device):
        if (parts := _parts_by_inductor(one)) is not None:
            yield one, parts


def _parts_by_inductor(one: GradientSum) -> int | None:
    """The number of partial sums; None if Inductor would not split this reduction, or would split the partial sums."""
    enough = ENOUGH_RESULTS * device_model(tensor_of(one.x).device).cores
    parts = parts_of(one.rows)
    if parts is None or one.columns >= enough:
        return None
    return parts if one.rows // parts <= ROWS_OF_A_PART or parts * one.columns >= enough else None


def _require_quicker(m: Match, sums: Sequence[GradientSum]) -> None:
    device = tensor_of(sums[0].x).device
    quicker = m.program.options.tune == "off" or is_quicker(device)
    m.require(quicker, "on {found} a kernel for each sum is as quick", found=device)


def is_quicker(device: torch.device) -> bool:
    """Do many sums take a GPU less time by the operator than by a kernel for each? Measured once, with usual sizes. Of
    a device that cannot be measured, the cost model is trusted."""
    parts, columns, count = 32, 1024, MOST
    if not can_measure(device, 8 * parts * columns * count):
        return True

    def each() -> list[torch.Tensor]:
        return [torch.ones(parts, columns, device=device) for _ in range(count)]

    def one_by_one() -> Work:
        matrices = each()
        return lambda: [matrix.sum(0) for matrix in matrices]

    def together() -> Work:
        matrices = each()
        return lambda: SUM_ROWS(matrices, torch.float32, None)

    sizes = f"{count} sums of {parts} rows of {columns} numbers"
    before, after = measured(f"{sizes}, one by one", device, one_by_one), measured(sizes, device, together)
    return before is not None and after is not None and after < before


@dataclass(frozen=True)
class BatchGradientSumsPass(Pass):
    """Adds up gradients that are sums over rows, such as those of biases and norms, many in one kernel on a GPU."""

    name = "batch_gradient_sums"

    def rules(self) -> Sequence[Rule]:
        return SumRowsTogether(), BatchGradientSums()
