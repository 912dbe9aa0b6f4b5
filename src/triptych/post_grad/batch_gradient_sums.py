"""`batch_gradient_sums`: finishes gradients that are sums over many rows, as of biases and norms, in few kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..cost import UNKNOWN, Moved, Operand, OperatorCall, Part, Work, bytes_of, device_model
from ..ir.facts import is_contiguous, is_static, tensor_of
from ..ir.partitioned import returns_gradients
from ..ir.program import Program
from ..ir.traits import is_view
from ..kernels.sum_parts import MOST
from ..rewrite.examples import declines, fires, mark_as_gradients
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from ..rules.sums_over_rows import Rounding, SumOverRows, sum_over_rows

SUM_PARTS = torch.ops.triptych.sum_parts.default
ROWS_OF_A_PART = 128
"""Rows per partial sum: as many as in Inductor's own split reductions. For 64 rows or fewer, Inductor generates a
persistent reduction, which took at least twice as long on an H200."""
MOST_PARTS = 128
ENOUGH_RESULTS = 64
"""Inductor does not split a reduction that has at least this many results per core of the GPU."""
MOST_ELEMENTS = 1 << 25
"""Larger operands do not fit into a GPU's L2 cache. Inductor fuses their sums with reductions along the other dim that
read the same operand (mix-order reduction), and the time of the second kernel is negligible."""

ON_CPU: dict[str, Any] = {"dialects": ("aten",), "prepare": mark_as_gradients, "settings": {"device": "cpu"}}


@dataclass(frozen=True)
class _Split:
    """A sum over rows, and the number of partial sums into which it is split."""

    over_rows: SumOverRows
    parts: int


@dataclass(frozen=True)
class _Gradients:
    """Gradients that are sums over rows: one that the graph computes as a sum, or all those of one `sum_parts`."""

    results: tuple[Node, ...]
    columns: tuple[int, ...]
    views: tuple[Node, ...]
    """Views of the results, and views of these views."""
    covers: tuple[Node, ...]
    """The nodes that compute the results."""
    rounding: Rounding
    bytes: int
    """The bytes that the last step of the sums reads and writes."""
    matrices: tuple[Node, ...] = ()
    """The partial sums that a `sum_parts` of the graph adds up."""
    split: _Split | None = None
    """The sum that the rewrite splits; None for the gradients of a `sum_parts`, which has its partial sums already."""

    @property
    def returned(self) -> list[Node]:
        return [node for node in (*self.results, *self.views) if node.graph.output_node() in node.users]


@dataclass(frozen=True)
class BatchGradientSums(Rule):
    """sum(x, 0), sum(y, 0) -> triptych::sum_parts([cat([parts of x summed, parts of y summed], 1)]); up to rounding

    Inductor computes a sum of many rows in two kernels, as a split reduction: partial sums, and the sum of these. The
    second kernel is tiny, and there is one for each bias and for each weight of a norm. Here the first kernels write
    their partial sums side by side into one tensor, and one kernel computes many gradients from it, also those whose
    partial sums an operator such as `triptych::norm_backward` has returned.

    The rule takes sums that the backward graph returns, whose operands are contiguous, of static shape, and in float32,
    float16 or bfloat16, if Inductor would split them.
    """

    device: str = "cuda"

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        if not returns_gradients(program.graph) or program.options.codegen != "inductor":
            return
        groups: dict[Any, list[_Gradients]] = {}
        for node in program.graph.nodes:
            if (gradients := self._read_sum(program, node) or self._read_sum_parts(program, node)) is not None:
                device = tensor_of(gradients.results[0]).device
                groups.setdefault((device, gradients.rounding), []).append(gradients)
        for together in groups.values():
            yield Match.at(
                program, *(node for g in together for node in g.returned), before=program.graph.output_node(),
                covers=[node for g in together for node in (*g.covers, *g.views)], together=together,
            )  # fmt: skip

    def _read_sum(self, program: Program, node: Node) -> _Gradients | None:
        if (over_rows := sum_over_rows(program, node)) is None:
            return None
        x = tensor_of(over_rows.x)
        if x.device.type != self.device or not is_static(x.shape) or not is_contiguous(x) or x.numel() > MOST_ELEMENTS:
            return None
        result, parts = over_rows.result, _parts_by_inductor(x)
        views = _views_that_are_returned(program, result)
        if parts is None or views is None:
            return None
        moved = parts * over_rows.columns * torch.float32.itemsize + bytes_of(tensor_of(result))
        split = _Split(over_rows, parts)
        columns = (over_rows.columns,)
        return _Gradients((result,), columns, views, over_rows.chain, over_rows.rounding, moved, split=split)

    def _read_sum_parts(self, program: Program, node: Node) -> _Gradients | None:
        if node.target is not SUM_PARTS:
            return None
        given: Any = node.args
        matrices, columns, dtype, through = given
        by_place: Any = {user.args[1]: user for user in node.users if user.target is getitem}
        results = tuple(by_place[i] for i in sorted(by_place))
        views = [_views_that_are_returned(program, result) for result in results]
        if sorted(by_place) != list(range(len(columns))) or len(node.users) != len(columns) or None in views:
            return None
        partial_sums = [tensor_of(matrix) for matrix in matrices]
        if any(t.device.type != self.device or t.dtype != torch.float32 for t in partial_sums):
            return None
        moved = sum(map(bytes_of, [*partial_sums, *map(tensor_of, results)]))
        of_all = tuple(view for of_one in views for view in of_one or ())
        return _Gradients(results, tuple(columns), of_all, (node, *results), (dtype, through), moved, tuple(matrices))

    def check(self, m, together):
        m.require(len(together) > 1, "no other gradient is such a sum")
        device = tensor_of(together[0].results[0]).device
        launches, ends = math.ceil(sum(len(g.results) for g in together) / MOST), [g.bytes for g in together]
        m.pays(Work.of(device, map(Moved, ends)), Work.of(device, launches * [_one_launch(sum(ends) / launches)]))

    def rewrite(self, op, m, together):
        in_order = [g for g in together if g.split is None]
        matrices: list[Any] = [matrix for g in in_order for matrix in g.matrices]
        by_parts: dict[int, list[Any]] = {}
        for g in together:
            if g.split is not None:
                by_parts.setdefault(g.split.parts, []).append((_partial_sums(op, g.split), g))
        for group in by_parts.values():
            matrices.append(op.cat([partial_sums for partial_sums, _ in group], 1))
            in_order += [g for _, g in group]
        columns = [count for g in in_order for count in g.columns]
        totals = op.call(SUM_PARTS, matrices, columns, *together[0].rounding)
        gradients: dict[Node, Any] = {}
        for i, result in enumerate(result for g in in_order for result in g.results):
            gradient, shape = op.getitem(totals, i), list(tensor_of(result).shape)
            gradients[result] = (gradient if len(shape) == 1 else op.reshape(gradient, shape)).node
        for view in (view for g in together for view in g.views):
            gradients[view] = op.again(view, gradients).node
        return tuple(gradients[root.node] for root in m.roots)

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


def parts_of(rows: int) -> int | None:
    """The number of partial sums for this many rows; None if the rows are few or cannot be divided evenly."""
    ideal = min(rows // ROWS_OF_A_PART, MOST_PARTS)
    fitting = [p for p in range(max(ideal // 2, 2), 2 * ideal) if rows % p == 0 and rows // p > ROWS_OF_A_PART // 2]
    return min(fitting, key=lambda parts: abs(math.log(parts / ideal)), default=None)


def _partial_sums(op: Any, split: _Split) -> Any:
    """The partial sums, written where the sum was, so that its operand need not stay in memory."""
    over_rows, parts = split.over_rows, split.parts
    emitter, x = op.at(over_rows.chain[0]), tensor_of(over_rows.x)
    rows = emitter.reshape(over_rows.x, [parts, math.prod(x.shape[:-1]) // parts, over_rows.columns])
    how = {} if x.dtype == torch.float32 else {"dtype": torch.float32}
    return emitter.sum(rows, [1], **how)


def _parts_by_inductor(x: torch.Tensor) -> int | None:
    """The number of partial sums; None if Inductor would not split this reduction, or would split the partial sums."""
    rows, columns, enough = math.prod(x.shape[:-1]), x.shape[-1], ENOUGH_RESULTS * device_model(x.device).cores
    parts = parts_of(rows)
    if parts is None or columns >= enough:
        return None
    return parts if rows // parts <= ROWS_OF_A_PART or parts * columns >= enough else None


def _views_that_are_returned(program: Program, node: Node) -> tuple[Node, ...] | None:
    """The views of a value and the views of these, in order; None if it is used for anything but to return it."""
    values = [node]
    for value in values:
        if not value.users:
            return None
        for user in value.users:
            if user.op == "output":
                continue
            call = program.call(user)
            if user.target is not getitem and (call is None or not is_view(call.op)):
                return None
            values.append(user)
    return tuple(values[1:])


@dataclass(frozen=True)
class SumsOfParts(OperatorCall):
    """One launch of the operator. Whether it is quicker than a kernel for each sum is measured once for a device."""

    def like(self) -> Part:
        return USUAL


def _one_launch(moved: float, operands: tuple[Any, ...] = ()) -> SumsOfParts:
    return SumsOfParts(SUM_PARTS, operands, does=(Moved(moved),), error=UNKNOWN)


USUAL_PARTS, USUAL_COLUMNS = 32, 1024
USUAL = _one_launch(
    torch.float32.itemsize * (USUAL_PARTS + 1) * USUAL_COLUMNS * MOST,
    ((Operand.contiguous((USUAL_PARTS, USUAL_COLUMNS * MOST), torch.float32),), (USUAL_COLUMNS,) * MOST,
     torch.float32, None),
)  # fmt: skip


@dataclass(frozen=True)
class BatchGradientSumsPass(Pass):
    """On a GPU, computes the last step of many gradients that are sums over rows, as of biases, in one kernel."""

    name = "batch_gradient_sums"

    def rules(self) -> Sequence[Rule]:
        return (BatchGradientSums(),)
