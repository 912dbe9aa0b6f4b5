"""`batch_gradient_sums`: finishes gradients that are sums over many rows, as of biases and norms, in few kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..cost import bytes_of, can_measure, device_model, measured
from ..cost.timing import Work
from ..ir.calls import Call
from ..ir.facts import is_contiguous, is_static, tensor_fact, tensor_of
from ..ir.partitioned import returns_gradients
from ..ir.program import Program
from ..ir.traits import is_view
from ..kernels.sum_parts import MOST
from ..rewrite.examples import declines, fires, mark_as_gradients
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

SUM_PARTS = torch.ops.triptych.sum_parts.default
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
class _GradientSum:
    """sum(x, all dims but the last), cast or reshaped, and returned, whole or in parts."""

    x: Node
    chain: tuple[Node, ...]
    """The sum, followed by the casts and reshapes of it."""
    views: tuple[Node, ...]
    """Views of the last node of `chain`, and views of these views."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes to which the sum, added up in float32, is rounded, in this order."""
    parts: int

    @property
    def result(self) -> Node:
        return self.chain[-1]

    @property
    def returned(self) -> list[Node]:
        return [node for node in (self.result, *self.views) if node.graph.output_node() in node.users]

    @property
    def columns(self) -> int:
        return tensor_of(self.x).shape[-1]


@dataclass(frozen=True)
class BatchGradientSums(Rule):
    """sum(x, 0), sum(y, 0) -> triptych::sum_parts(cat([parts of x summed, parts of y summed], 1)); up to rounding

    Inductor computes a sum of many rows in two kernels, as a split reduction: partial sums, and the sum of these. The
    second kernel is tiny, and there is one for each bias and for each weight of a norm. Here the first kernels write
    their partial sums side by side into one tensor, and one kernel computes many gradients from it.

    The rule takes sums that the backward graph returns, whose operands are contiguous, of static shape, and in float32,
    float16 or bfloat16, if Inductor would split them.
    """

    device: str = "cuda"

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        if not returns_gradients(program.graph) or program.options.codegen != "inductor":
            return
        groups: dict[Any, list[_GradientSum]] = {}
        for node in program.graph.nodes:
            if (gradient_sum := self._read(program, node)) is not None:
                groups.setdefault((tensor_of(node).device, gradient_sum.dtypes, gradient_sum.parts), []).append(
                    gradient_sum
                )
        for sums in groups.values():
            yield Match.at(
                program, *(node for s in sums for node in s.returned), before=program.graph.output_node(),
                covers=[node for s in sums for node in (*s.chain, *s.views)], sums=sums,
            )  # fmt: skip

    def _read(self, program: Program, node: Node) -> _GradientSum | None:
        call = program.call(node)
        if call is None or call.op != "sum" or call.mutates:
            return None
        x, total = tensor_fact(call.args["self"]), tensor_fact(node)
        if x is None or total is None or x.device.type != self.device or not _adds_rows(call, x):
            return None
        if x.dtype not in DTYPES or total.dtype not in DTYPES or not is_static(x.shape) or not is_contiguous(x):
            return None
        if x.numel() > MOST_ELEMENTS:
            return None
        parts = _parts_by_inductor(x)
        chain = _casts_and_reshapes(program, node)
        views = _views_that_are_returned(program, chain[-1])
        if parts is None or views is None:
            return None
        dtypes = [tensor_of(n).dtype for n in chain]
        changes = tuple(now for was, now in zip([torch.float32, *dtypes], dtypes) if was != now)
        return _GradientSum(call.args["self"], chain, views, changes, parts) if len(changes) <= 2 else None

    def check(self, m, sums):
        m.require(len(sums) > 1, "no other gradient is such a sum")
        device = tensor_of(sums[0].x).device
        quicker = m.program.options.tune == "off" or is_quicker(device)
        m.require(quicker, "on {found}, a separate kernel for each sum is as quick", found=device)
        model, ends = device_model(device), [_last_step(s) for s in sums]
        launches = math.ceil(len(sums) / MOST)
        m.pays(sum(map(model.copy, ends)), launches * model.copy(sum(ends) / launches), sure=True)

    def rewrite(self, op, m, sums):
        partial_sums = []
        for s in sums:  # at the sum, so that its operand need not stay in memory
            emitter, x = op.at(s.chain[0]), tensor_of(s.x)
            rows = emitter.reshape(s.x, [s.parts, math.prod(x.shape[:-1]) // s.parts, s.columns])
            how = {} if x.dtype == torch.float32 else {"dtype": torch.float32}
            partial_sums.append(emitter.sum(rows, [1], **how))
        totals = op.call(SUM_PARTS, op.cat(partial_sums, 1), [s.columns for s in sums], *_rounding(sums[0].dtypes))
        gradients: dict[Node, Any] = {}
        for i, s in enumerate(sums):
            gradient, shape = op.getitem(totals, i), list(tensor_of(s.result).shape)
            gradients[s.result] = (gradient if len(shape) == 1 else op.reshape(gradient, shape)).node
            for view in s.views:
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


def _parts_by_inductor(x: torch.Tensor) -> int | None:
    """The number of partial sums; None if Inductor would not split this reduction, or would split the partial sums."""
    rows, columns, enough = math.prod(x.shape[:-1]), x.shape[-1], ENOUGH_RESULTS * device_model(x.device).cores
    parts = parts_of(rows)
    if parts is None or columns >= enough:
        return None
    return parts if rows // parts <= ROWS_OF_A_PART or parts * columns >= enough else None


def _adds_rows(call: Call, x: torch.Tensor) -> bool:
    """Does a sum go over all dims but the last?"""
    dim = call.args.get("dim")
    dims = [dim] if isinstance(dim, int) else dim or []
    return x.dim() > 1 and {d % x.dim() for d in dims} == set(range(x.dim() - 1))


def _casts_and_reshapes(program: Program, node: Node) -> tuple[Node, ...]:
    """The node, followed by the casts and reshapes of it, as long as each value in the chain has no other user."""
    chain = [node]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        call, value = program.call(user), tensor_fact(user)
        if call is None or call.op not in ("reshape", "to") or value is None or value.dtype not in DTYPES:
            break
        if value.device != tensor_of(node).device:
            break
        chain.append(user)
    return tuple(chain)


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


def _rounding(dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtype of the results, and the dtype to which sums in float32 are rounded before that, if any."""
    *through, dtype = dtypes or (torch.float32,)
    return dtype, through[0] if through else None


def _last_step(s: _GradientSum) -> float:
    """The bytes that the second kernel of a sum reads and writes."""
    return s.parts * s.columns * torch.float32.itemsize + bytes_of(tensor_of(s.result))


def is_quicker(device: torch.device) -> bool:
    """Is one launch of the operator faster on a GPU than a separate kernel for each of many sums? This is measured
    once, with typical sizes. On a device that cannot be measured, the cost model alone decides."""
    parts, columns, count = 32, 1024, MOST
    how: dict[str, Any] = {"dtype": torch.float32, "device": device}
    if not can_measure(device, 8 * parts * columns * count):
        return True

    def one_by_one() -> Work:
        each = [torch.ones(parts, columns, **how) for _ in range(count)]
        return lambda: [part.sum(0) for part in each]

    def together() -> Work:
        whole = torch.ones(parts, columns * count, **how)
        return lambda: SUM_PARTS(whole, [columns] * count, torch.float32, None)

    sizes = f"{count} sums of {parts} parts of {columns} numbers"
    before, after = measured(f"{sizes}, one by one", device, one_by_one), measured(sizes, device, together)
    return before is not None and after is not None and after < before


@dataclass(frozen=True)
class BatchGradientSumsPass(Pass):
    """On a GPU, computes the last step of many gradients that are sums over rows, as of biases, in one kernel."""

    name = "batch_gradient_sums"

    def rules(self) -> Sequence[Rule]:
        return (BatchGradientSums(),)
