"""Tensors that hold one value become `full`, and operations that their operands' values decide vanish.

What values hold is asked of `ir/values.py`: one number, a pattern of the index, a range. Integers and booleans fold
freely. Floats fold as IEEE allows: x*0 stays (NaN and infinity give NaN), x+0.0 goes only where no element can be -0.0
(-0.0 + 0.0 is 0.0), a clamp goes only where no bound is a zero whose sign could show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import TORCH
from ..ir.traits import is_reduction, is_view
from ..ir.values import Knowledge, knowledge
from ..passes.base import Pass, PassRun
from ..rewrite.checks import PlainTerms
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from ..testing.examples import declines, fires
from .decided import simplify

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64

CONSTRUCTORS = frozenset("full scalar_tensor tensor lift_fresh_copy".split())
"""What needs no operand is as good as `full`."""


def _written(x):
    y = torch.zeros(4)
    y.add_(x)
    return y * 2


def _counted_up(x):
    y = torch.zeros(4).abs()
    y.add_(1)
    return x.sin() + y.expand(4)


def _two_views(x):
    y = torch.zeros(2, 8)
    return y + 1, y, y.view(16)


def _mask(x):
    keep = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool) & (
        torch.zeros(x.shape[0], dtype=torch.int64) == 0
    )
    return torch.where(keep, x @ x.t(), float("-inf"))


def _triangles(x):
    n = x.shape[0]
    rows, keys = torch.arange(n)[:, None], torch.arange(n)
    return torch.where((keys <= rows) | (keys > rows), x, 0.0) + x.masked_fill((keys < rows) & (keys > rows), 1.0)


def _one_sequence(x):
    """Which of several packed sequences each position belongs to: there is one."""
    positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return x.masked_fill(sequence != 0, 0.0) + 1


@dataclass(frozen=True)
class ConstantFoldUniformValue(Pass):
    """Computes tensors that hold one value at compile time; x*1, x+0, x/1 and x*0 go where IEEE allows.

    Torch itself computes the number, in the tensor's dtype, and only by operations whose rounding is fixed.
    """

    name = "constant_fold_uniform_value"

    def run(self, run: PassRun) -> None:
        with _private.without_dispatch_modes():  # numbers are computed for real, also inside a compile
            Folder(run).fold()

    examples = [
        fires(lambda x: x + (torch.zeros(4, 8) + 1) * 3, "f32[4, 8]"),
        fires(lambda x: x + torch.ones_like(x).to(bf16) / 3, "f32[4, 8]"),
        fires(lambda x: torch.full((4, 1), 0.1, dtype=bf16).expand(4, 8) * 3 + x, "bf16[4, 8]"),
        fires(lambda x: x * x.new_ones(4, 8) - x.new_zeros(8), "f32[4, 8]", dynamic=True),
        fires(lambda x: ((x * torch.ones(4, 8)).sin(), (x / 1).cos()), "f32[4, 1]"),
        fires(lambda x: x.relu() * torch.ones_like(x), "f32[4, 8]", dynamic=True),
        fires(_mask, "f32[4, 8]"),
        fires(_mask, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.where(torch.zeros(8, dtype=torch.bool), x.sin(), x.cos()), "f32[4, 8]"),
        fires(lambda x: x.sin().masked_fill(torch.zeros(4, 8) > 0, 2.0), "f32[4, 8]"),
        fires(lambda x: x.sin() + torch.full((8,), -0.0), "f32[4, 8]"),
        fires(lambda x: x.exp() + torch.zeros(8), "f32[4, 8]"),
        fires(lambda x: torch.rand_like(x) + torch.zeros(4, dtype=f64), "f32[4]"),
        fires(lambda x: (x + 1) * torch.zeros_like(x), "i64[4, 8]"),
        fires(lambda x: (x + 0.0, x * 1.0, x * True), "i32[4, 8]"),
        fires(lambda x: torch.logical_and(x > 0, torch.ones(8, dtype=torch.bool)), "f32[4, 8]"),
        fires(lambda x: torch.zeros(0, 8) + 1, "f32[4]"),
        fires(lambda x: torch.scalar_tensor(3.0) * 2 + x, "f32[4]", dialects=("aten",)),
        declines(lambda x: x.sin() + torch.zeros(8), "f32[4, 8]", because="-0.0"),
        declines(lambda x: x.sin() * torch.zeros(8), "f32[4, 8]", because="NaN"),
        declines(lambda x: x.sin() * torch.full((), 1.0001, dtype=f32), "bf16[4, 8]"),
        declines(lambda x: torch.zeros(4, 8), "f32[4]"),
        declines(lambda x: torch.rand(4) + 1, "f32[4]"),
        declines(_written, "f32[4]", dialects=("torch",)),
        declines(_counted_up, "f32[4]", because="is written", dialects=("torch",)),
        fires(lambda x: x * torch.ones(4), "f32[4]"),
        fires(lambda x: (y := x.sin(), y / torch.ones(4), torch.where(torch.ones(4) > 0, x, y)), "f32[4]"),
        declines(lambda x: x * 1.0, "f32[4]", because="leaves the graph"),
        declines(lambda x: torch.exp(torch.zeros(4)) + x, "f32[4]"),
        fires(_two_views, "f32[4]"),
        # comparisons that always hold, or never
        fires(lambda x: x.masked_fill(torch.arange(4)[:, None] < 0, 2.0) * 3, "f32[4, 8]"),
        fires(lambda x: x.masked_fill(torch.arange(x.shape[0])[:, None] < 0, 2.0) * 3, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.where(torch.arange(8) - 8 < 0, x, 1.0).sin(), "f32[4, 8]"),
        fires(lambda x: x.clamp(0, 7) < 8, "i64[4, 8]"),
        fires(lambda x: x.clamp(0, 7) < 8, "i64[4, 8]", dynamic=True),
        fires(lambda x: (x % 5 == 5, x.bool().long() >= 0, x.abs().relu()), "i32[4, 8]"),
        fires(lambda x: x.sigmoid() > 1.5, "f32[4, 8]"),
        declines(lambda x: x.sigmoid() > -0.5, "f32[4, 8]"),  # not so for NaN
        declines(lambda x: x.clamp(0, 7) < 7, "i64[4, 8]"),
        declines(lambda x: x > -1, "u8[4, 8]"),  # -1 is 255 there
        # masks whose pattern decides them
        fires(_triangles, "f32[6, 6]"),
        fires(_triangles, "f32[6, 6]", dynamic=True),
        fires(_one_sequence, "f32[2, 6]"),
        fires(_one_sequence, "f32[2, 6]", dynamic=True),
        declines(lambda x: x.masked_fill(torch.ones(8, 8).tril() == 0, 2.0), "f32[8, 8]"),
        fires(lambda x: torch.where(x > 0, True, False) & torch.where(x > 1, False, True), "f32[4, 8]"),
        fires(lambda x: ((x > 0) == True).logical_not() != False, "f32[4, 8]"),  # noqa: E712
        # bounds
        fires(lambda x: x.sigmoid().clamp(-1, 2) + 1, "f32[4, 8]"),
        fires(lambda x: x.exp().relu() + 1, "f32[4, 8]"),
        fires(lambda x: torch.maximum(x.clamp(0, 3), torch.full_like(x, 7)) + 1, "i64[4, 8]", dynamic=True),
        fires(lambda x: torch.minimum(x.clamp(0, 3), torch.arange(4, 12)) + 1, "i64[4, 8]"),
        declines(lambda x: x.clamp(0, 1).clamp(0, 1), "f32[4, 8]"),  # of -0.0 the first may make 0.0
        declines(lambda x: torch.maximum(x.sigmoid(), torch.full((8,), -1.0)), "f32[4, 8]"),  # NaN wins
        # integers with themselves, divided by one
        fires(lambda x: (x - x, x ^ x, x & x, x == x), "i64[4, 8]", dynamic=True),
        fires(lambda x: (x // 1 + 1, x % 1), "i64[4, 8]"),
        declines(lambda x: (x - x, x == x), "f32[4, 8]"),  # infinity less itself is NaN, which is unlike itself
        # what counts is an `arange`, a sum over shapes alone is a number
        fires(lambda x: x + torch.ones(8, dtype=torch.int64).cumsum(0), "f32[4, 8]"),
        fires(lambda x: x + torch.ones_like(x, dtype=torch.int64).cumsum(1), "f32[4, 8]", dynamic=True),
        fires(lambda x: x * torch.arange(8).sum(), "f32[4, 8]"),
        declines(lambda x: x + torch.arange(8), "f32[4, 8]"),
    ]


Made = Callable[[Emitter], Any]


class Folder:
    """One run over a graph, first node to last: what each operand is has been found out before."""

    def __init__(self, run: PassRun) -> None:
        self.run = run
        self.program = run.program
        self.know: Knowledge = knowledge(run.program)
        self.numbers: dict[Node, torch.Tensor] = {}
        """Values that are one number, in the order of the graph."""

    def fold(self) -> None:
        views = []
        for node in list(self.program.graph.nodes):
            call = self.program.call(node)
            found = tensor_fact(node)
            if call is None or call.mutates or found is None:
                continue
            value = self._number_of(node, call, found)
            if value is None:
                simplify(self, node, call, found)
            elif is_view(call.op) or call.op == "tensor_getitem":
                views.append(node)
            elif call.op not in CONSTRUCTORS:
                self._fold_to_full(node, value)
        for node in views:  # what used them is folded by now, so most of them are unused
            if node.users:
                self._fold_to_full(node, self.numbers[node], keeps_strides=True)
        for node in reversed(self.numbers):
            if not node._erased and not node.users and self.run.tally.fired:
                self.run.rewriter.erase(node)

    def _number_of(self, node: Node, call: Call, found: torch.Tensor) -> torch.Tensor | None:
        """The number that all elements are: known by its pattern, or by computing a sum over shapes alone."""
        if self.program.aliasing.written(node):  # it may be another one before the write
            return None
        value = self.know.uniform(node)
        if value is None and is_reduction(call.op) and isinstance(found.numel(), int) and found.numel() == 1:
            computed = self.know.evaluate(node)
            value = None if computed is None else computed.reshape(())
        if value is not None:
            self.numbers[node] = value
        return value

    def number(self, operand: Any) -> bool | int | float | None:
        """An operand that is one number."""
        if isinstance(operand, (bool, int, float)):
            return operand
        value = self.numbers.get(operand) if isinstance(operand, Node) else None
        value = self.know.uniform(operand) if value is None else value
        return None if value is None else value.item()

    def _fold_to_full(self, node: Node, value: torch.Tensor, keeps_strides: bool = False) -> None:
        self.replace("fold_to_full", node, lambda op: self.full(op, node, value.item()), keeps_strides)

    def replace(self, what: str, node: Node, make: Made, keeps_strides: bool = False) -> None:
        made: list[Node] = []

        def noting(op: Emitter) -> Any:
            result = make(op)
            made.extend(op.made)
            return result

        if self.run.replace(what, node, noting, terms=PlainTerms(keeps_strides=keeps_strides)):
            for new in made:
                if not new._erased and (value := self.know.uniform(new)) is not None:
                    self.numbers[new] = value

    def full(self, op: Emitter, node: Node, number: bool | int | float) -> Any:
        like = tensor_fact(node)
        assert like is not None
        if like.requires_grad:
            raise Refused("its gradient is asked for")
        return op.full(list(like.shape), number, dtype=like.dtype, device=like.device)

    def dropping(self, what: str, node: Node, dropped: Any, make: Made) -> None:
        """Before autograd, an operand that is used no more gets no gradient where it got zeros."""
        lost = tensor_fact(dropped)
        if self.program.dialect == TORCH and lost is not None and lost.requires_grad:
            self.run.declined(what, node, "a gradient of zeros would become none at all")
            return
        self.replace(what, node, make)

    def as_result(self, op: Emitter, node: Node, operand: Node, result: torch.Tensor) -> Any:
        """The operand in the dtype and shape that the operation gave it.

        What leaves the graph does so in memory of its own, as before: a copy is less than an operation on two tensors.
        """
        found = tensor_fact(operand)
        value: Any = self.program.value(operand)
        if found is not None and found.dtype != result.dtype:
            value = op.to(value, dtype=result.dtype)
        elif len(node.all_input_nodes) > 1 and self._would_be_shared(node, operand):
            value = op.clone(value)
        if found is not None and not known_equal(found.shape, result.shape):
            value = op.expand(value, list(result.shape))
        return value

    def _would_be_shared(self, node: Node, operand: Node) -> bool:
        """Does the value leave the graph, and has the caller the operand's memory already?"""
        aliasing = self.program.aliasing
        return aliasing.is_output(node) and (aliasing.is_input(operand) or aliasing.is_output(operand))
