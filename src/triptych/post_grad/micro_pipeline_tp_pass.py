"""`micro_pipeline_tp_pass`: overlaps products with the communication of their operand, or of their result.

A tensor parallel layer gathers its input before a product, or reduces and scatters the result of one. The operators
of symmetric memory compute the product part by part: the parts of ranks that have arrived are multiplied while others
are under way. Only process groups with symmetric memory have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..communication import gather_matmul, matmul_scatter
from ..communication.costs import COLUMNS, INNER, ROWS, pipelining
from ..communication.example_group import (
    NAME,
    RANKS,
    SYMMETRIC,
    all_gather,
    all_gather_along,
    reduce_scatter_along,
    wait,
)
from ..communication.products import Product
from ..ir.collectives import Collective, collectives
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}
E4M3 = torch.float8_e4m3fn


def _column_parallel(x: Any, w: Any) -> Any:
    return all_gather_along(x) @ w


def _queries_keys_values(x: Any, q: Any, k: Any, v: Any) -> Any:
    whole = all_gather_along(x)
    return whole @ q, whole @ k.t(), whole @ v


def _along_the_sequence(x: Any, w: Any) -> Any:
    return all_gather_along(x, 1) @ w


def _with_bias(x: Any, w: Any, b: Any) -> Any:
    return torch.addmm(b, all_gather_along(x), w)


def _used_elsewhere(x: Any, w: Any) -> Any:
    whole = all_gather_along(x, 1)
    return whole @ w, whole.exp()


def _saved_for_backward(x: Any, w: Any) -> Any:
    whole = all_gather_along(x)
    return whole @ w, whole


def _no_symmetric_memory(x: Any, w: Any) -> Any:
    return all_gather_along(x, group=NAME) @ w


def _scaled_sum(x: Any, w: Any, b: Any) -> Any:
    return torch.addmm(b, all_gather_along(x), w, alpha=2)


def _needs_the_first(x: Any, w: Any) -> Any:
    whole = all_gather_along(x)
    first = whole @ w
    return first, whole @ (w * first.sum())


def _read_before(x: Any, w: Any) -> Any:
    whole = all_gather_along(x)
    return whole @ (w + whole.sum())


def _right_operand(x: Any, w: Any) -> Any:
    return w @ all_gather_along(x)


def _fp8(x: Any, w: Any) -> Any:
    one = torch.ones((), dtype=torch.float32)
    whole = all_gather_along(x.to(E4M3).view(torch.uint8)).view(E4M3)
    return torch.ops.aten._scaled_mm(whole, w.to(E4M3).t(), one, one, out_dtype=torch.bfloat16)


def _row_parallel(x: Any, w: Any) -> Any:
    return reduce_scatter_along(x @ w)


def _scatter_the_sequence(x: Any, w: Any) -> Any:
    return reduce_scatter_along(x @ w, 1, "avg")


def _product_used_before(x: Any, w: Any) -> Any:
    y = x @ w
    return reduce_scatter_along(y), y.sum()


def _largest(x: Any, w: Any) -> Any:
    return reduce_scatter_along(x @ w, 0, "max")


def _bias_reduced(x: Any, w: Any, b: Any) -> Any:
    return reduce_scatter_along(torch.addmm(b, x, w))


def _half_rows(x: Any, w: Any) -> Any:
    return reduce_scatter_along((x @ w).view(2, 6))


def _activated(x: Any, w: Any) -> Any:
    return reduce_scatter_along((x @ w).relu())


def _no_memory_to_scatter(x: Any, w: Any) -> Any:
    return reduce_scatter_along(x @ w, group=NAME)


def _fp8_scattered(x: Any, w: Any) -> Any:
    one = torch.ones((), dtype=torch.float32)
    y = torch.ops.aten._scaled_mm(x.to(E4M3), w.to(E4M3).t(), one, one, out_dtype=torch.bfloat16)
    return reduce_scatter_along(y)


def _gathered_twice_waited(x: Any, w: Any) -> Any:
    started = all_gather(x, SYMMETRIC)
    return wait(started) @ w, wait(started) + 1


def _planned(program: Program, plan_for: Callable[[Program, Collective], Any]) -> Iterator[Match]:
    """A match for each collective for which `plan_for` returns a plan, or a refusal that says why there is none."""
    for collective in list(collectives(program.graph)):
        plan = None if collective.node._erased else plan_for(program, collective)
        if plan is not None:
            yield Match.at(program, collective.node, problem=plan if isinstance(plan, Refusal) else None, plan=plan)


def _record_costs(m: Match, collective: Collective, products: Sequence[Product], divided: int) -> None:
    operands = [(product.left, product.right) for product in products]
    forms = pipelining(collective, operands, divided, m.program.options.link)
    if forms is not None:
        m.pays(*forms)


class FuseAllGatherMatmul(Rule):
    """all_gather(x) @ w, all_gather(x) @ v, ... -> fused_all_gather_matmul(x, [w, v, ...]), up to rounding

    The gather may be along any dim; the products may have leading dims, a bias, or scaled 8-bit floats. Other users of
    the gathered tensor read it from the results of the operator.
    """

    exact = False
    asked_for = True  # nothing is known of the ranks' real links

    def sites(self, program: Program) -> Iterator[Match]:
        return _planned(program, gather_matmul.gather_matmul)

    def check(self, m, plan):
        is_last = plan.arrangement.dim == len(plan.arrangement.shape) - 1
        _record_costs(m, plan.collective, plan.products, INNER if is_last else ROWS)

    def rewrite(self, op, m):
        return gather_matmul.emit(op, m.program, m.bindings["plan"])

    examples = [
        fires(_column_parallel, "f32[3, 8]", "f32[8, 5]", **ATEN),
        fires(_queries_keys_values, "f32[3, 4, 8]", "f32[8, 5]", "f32[6, 8]", "f32[8, 7]", **ATEN),
        fires(_along_the_sequence, "bf16[3, 4, 8]", "bf16[8, 5]", **ATEN),
        fires(_along_the_sequence, "f32[3, 1024]", "f32[2048, 5]", **ATEN),
        fires(_with_bias, "f32[3, 8]", "f32[8, 5]", "f32[5]", **ATEN),
        fires(_used_elsewhere, "f32[3, 4, 8]", "f32[8, 5]", **ATEN),
        fires(_saved_for_backward, "f32[3, 8]", "f32[8, 5]", **ATEN),
        fires(_needs_the_first, "f32[3, 8]", "f32[8, 5]", **ATEN),
        fires(_fp8, "bf16[16, 32]", "bf16[16, 32]", **ATEN),
        declines(_no_symmetric_memory, "f32[3, 8]", "f32[8, 5]", because="symmetric memory is not enabled", **ATEN),
        declines(_along_the_sequence, "f32[3, 8]", "f32[16, 5]", because="too few columns", **ATEN),
        declines(_scaled_sum, "f32[3, 8]", "f32[8, 5]", "f32[5]", **ATEN),
        declines(_read_before, "f32[3, 8]", "f32[8, 5]", because="is needed first", **ATEN),
        declines(_right_operand, "f32[3, 8]", "f32[5, 6]", **ATEN),
        declines(_gathered_twice_waited, "f32[3, 8]", "f32[8, 5]", because="has other uses than one wait", **ATEN),
        declines(_column_parallel, "f32[3, 8]", "f32[8, 5]", dynamic=True, **ATEN),
    ]


class FuseMatmulReduceScatter(Rule):
    """reduce_scatter(x @ w) -> fused_matmul_reduce_scatter(x, w), up to rounding

    It takes sums and averages, scattered along any dim, and products of scaled 8-bit floats too.
    """

    exact = False
    asked_for = True  # nothing is known of the ranks' real links

    def sites(self, program: Program) -> Iterator[Match]:
        return _planned(program, matmul_scatter.matmul_scatter)

    def check(self, m, plan):
        _record_costs(m, plan.collective, [plan.product], COLUMNS if plan.dim == len(plan.shape) - 1 else ROWS)

    def rewrite(self, op, m):
        return matmul_scatter.emit(op, m.program, m.bindings["plan"])

    examples = [
        fires(_row_parallel, "f32[6, 8]", "f32[8, 5]", **ATEN),
        fires(_row_parallel, "f32[4, 3, 8]", "f32[8, 5]", **ATEN),
        fires(_scatter_the_sequence, "f32[3, 4, 8]", "f32[8, 5]", **ATEN),
        fires(_scatter_the_sequence, "f32[3, 8]", f"f32[8, {1024 * RANKS}]", **ATEN),
        fires(_fp8_scattered, "bf16[16, 32]", "bf16[16, 32]", **ATEN),
        declines(_product_used_before, "f32[6, 8]", "f32[8, 5]", because="is used elsewhere", **ATEN),
        declines(_largest, "f32[6, 8]", "f32[8, 5]", because="the operator reduces only by sum or avg", **ATEN),
        declines(_bias_reduced, "f32[6, 8]", "f32[8, 5]", "f32[5]", because="a bias is added", **ATEN),
        declines(_activated, "f32[6, 8]", "f32[8, 5]", **ATEN),
        declines(_half_rows, "f32[3, 8]", "f32[8, 4]", because="parts of the ranks differ in size", **ATEN),
        declines(_no_memory_to_scatter, "f32[6, 8]", "f32[8, 5]", because="symmetric memory is not enabled", **ATEN),
        declines(_scatter_the_sequence, "f32[3, 8]", "f32[8, 6]", because="too few columns", **ATEN),
        declines(_row_parallel, "f32[6, 8]", "f32[8, 5]", dynamic=True, **ATEN),
    ]


@dataclass(frozen=True)
class MicroPipelineTpPass(Pass):
    """Computes products while parts of their operand, or of their result, are being sent between the ranks.

    It takes only process groups with symmetric memory, on GPUs; otherwise it declines. What the cost model says is
    recorded, but does not decide: the link between the ranks is known only roughly.
    """

    name = "micro_pipeline_tp_pass"
    default = False

    def rules(self) -> Sequence[Rule]:
        return (FuseAllGatherMatmul(), FuseMatmulReduceScatter())
