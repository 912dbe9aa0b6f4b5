"""Tensors that hold one value become `full`, and arithmetic with them vanishes where IEEE allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import TORCH
from ..ir.traits import is_view
from ..ir.uniform import Uniforms, never_negative_zero
from ..passes.base import Pass, PassRun
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import PlainTerms
from ..testing.examples import declines, fires

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64

CONSTRUCTORS = frozenset("full scalar_tensor tensor lift_fresh_copy".split())
"""What needs no operand is as good as `full`."""


def _written(x):
    y = torch.zeros(4)
    y.add_(x)
    return y * 2


def _two_views(x):
    y = torch.zeros(2, 8)
    return y + 1, y, y.view(16)


def _mask(x):
    keep = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool) & (
        torch.zeros(x.shape[0], dtype=torch.int64) == 0
    )
    return torch.where(keep, x @ x.t(), float("-inf"))


@dataclass(frozen=True)
class ConstantFoldUniformValue(Pass):
    """Computes tensors that hold one value at compile time; x*1, x+0, x/1 and x*0 go where IEEE allows.

    Torch itself computes the number, in the tensor's dtype, and only by operations whose rounding is fixed.
    """

    name = "constant_fold_uniform_value"

    def run(self, run: PassRun) -> None:
        with _private.without_dispatch_modes():  # numbers are computed for real, also inside a compile
            _Folder(run).fold()

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
        declines(lambda x: x * torch.ones(4), "f32[4]", because="leaves the graph"),
        declines(lambda x: torch.exp(torch.zeros(4)) + x, "f32[4]"),
        fires(_two_views, "f32[4]"),
    ]


Made = Callable[[Emitter], Any]


class _Folder:
    def __init__(self, run: PassRun) -> None:
        self.run = run
        self.program = run.program
        self.uniforms = Uniforms(run.program)

    def fold(self) -> None:
        views = []
        for node in list(self.program.graph.nodes):
            value = self.uniforms.look(node)
            call = self.program.call(node)
            if call is None or call.mutates or tensor_fact(node) is None:
                continue
            if value is None:
                self._simplify(node, call)
            elif is_view(call.op) or call.op == "tensor_getitem":
                views.append(node)
            elif call.op not in CONSTRUCTORS:
                self._fold_to_full(node, value)
        for node in views:  # what used them is folded by now, so most of them are unused
            if node.users:
                self._fold_to_full(node, self.uniforms.known[node], keeps_strides=True)
        for node in reversed(self.uniforms.known):
            if not node._erased and not node.users and self.run.tally.fired:
                self.run.rewriter.erase(node)

    def _fold_to_full(self, node: Node, value: torch.Tensor, keeps_strides: bool = False) -> None:
        self._replace("fold_to_full", node, lambda op: self._full(op, node, value.item()), keeps_strides)

    def _replace(self, what: str, node: Node, make: Made, keeps_strides: bool = False) -> None:
        made: list[Node] = []

        def noting(op: Emitter) -> Any:
            result = make(op)
            made.extend(op.made)
            return result

        if self.run.replace(what, node, noting, terms=PlainTerms(keeps_strides=keeps_strides)):
            for new in made:
                if not new._erased:
                    self.uniforms.look(new)

    def _full(self, op: Emitter, node: Node, number: bool | int | float) -> Any:
        like = tensor_fact(node)
        assert like is not None
        if like.requires_grad:
            raise Refused("its gradient is asked for")
        return op.full(list(like.shape), number, dtype=like.dtype, device=like.device)

    # ---- arithmetic with one uniform operand ----

    def _simplify(self, node: Node, call: Call) -> None:
        if call.op in ("where", "masked_fill"):
            self._choose(node, call)
            return
        if call.op not in IDENTITIES or "alpha" in call.args:
            return
        left, right = call.args.get("self"), call.args.get("other")
        for operand, other in ((left, right), (right, left)):
            if operand is right and call.op not in COMMUTES:
                continue
            number = self._number(other)
            if isinstance(operand, Node) and number is not None:
                self._with_number(node, call, operand, number)
                return

    def _number(self, operand: Any) -> bool | int | float | None:
        if isinstance(operand, (bool, int, float)):
            return operand
        value = self.uniforms.value(operand)
        return None if value is None else value.item()

    def _with_number(self, node: Node, call: Call, operand: Node, number: bool | int | float) -> None:
        what, neutral, absorbing = IDENTITIES[call.op]
        result, found = tensor_fact(node), tensor_fact(operand)
        if result is None or found is None or result.dtype.is_complex:
            return
        exact = not result.dtype.is_floating_point
        if call.op == "div" and "rounding_mode" in call.args and not exact:
            return
        if call.op in BITWISE and result.dtype == torch.bool:
            neutral, absorbing = BITWISE[call.op]
        if neutral is not None and number == neutral:
            if call.op in ("add", "sub") and not exact and not self._may_drop_zero(call.op, operand, number):
                self.run.declined(what, node, "the value may hold -0.0, which adding 0.0 turns into 0.0")
                return
            self._replace(what, node, lambda op: self._as_result(op, operand, result))
        elif absorbing is not None and number == absorbing:
            if call.op == "mul" and not exact:
                self.run.declined("multiply_by_zero", node, "0 times NaN or infinity is NaN")
                return
            self._dropping("absorb", node, operand, lambda op: self._full(op, node, absorbing))

    def _may_drop_zero(self, op: str, operand: Node, number: bool | int | float) -> bool:
        added = math.copysign(1, number) * (-1 if op == "sub" else 1)
        return added < 0 or never_negative_zero(self.uniforms, operand)

    def _choose(self, node: Node, call: Call) -> None:
        mask = self.uniforms.value(call.args.get("condition", call.args.get("mask")))
        result = tensor_fact(node)
        if mask is None or mask.dtype != torch.bool or result is None:
            return
        is_where = call.op == "where"
        branches = ("self", "other") if is_where else ("value", "self")
        kept, dropped = (call.args.get(b) for b in (branches if mask.item() else branches[::-1]))
        if isinstance(kept, Node):
            self._dropping("choose_branch", node, dropped, lambda op: self._as_result(op, kept, result))
        elif isinstance(kept, (bool, int, float)):
            self._dropping("choose_branch", node, dropped, lambda op: self._full(op, node, kept))

    def _dropping(self, what: str, node: Node, dropped: Any, make: Made) -> None:
        """Before autograd, an operand that is used no more gets no gradient where it got zeros."""
        lost = tensor_fact(dropped)
        if self.program.dialect == TORCH and lost is not None and lost.requires_grad:
            self.run.declined(what, node, "a gradient of zeros would become none at all")
            return
        self._replace(what, node, make)

    def _as_result(self, op: Emitter, operand: Node, result: torch.Tensor) -> Any:
        """The operand in the dtype and shape that the operation gave it."""
        found = tensor_fact(operand)
        value: Any = self.program.value(operand)
        if found is not None and found.dtype != result.dtype:
            value = op.to(value, dtype=result.dtype)
        if found is not None and not known_equal(found.shape, result.shape):
            value = op.expand(value, list(result.shape))
        return value


COMMUTES = frozenset("add mul logical_and logical_or bitwise_and bitwise_or bitwise_xor".split())

IDENTITIES: dict[str, tuple[str, Any, Any]] = {
    "add": ("add_zero", 0, None),
    "sub": ("subtract_zero", 0, None),
    "mul": ("multiply_by_one", 1, 0),
    "div": ("divide_by_one", 1, None),
    "logical_and": ("and_true", True, False),
    "logical_or": ("or_false", False, True),
    "bitwise_and": ("and_ones", -1, 0),
    "bitwise_or": ("or_zero", 0, None),
    "bitwise_xor": ("xor_zero", 0, None),
}
"""What the change is called, the number that changes nothing, and the number that leaves nothing else."""

BITWISE: dict[str, tuple[Any, Any]] = {
    "bitwise_and": (True, False),
    "bitwise_or": (False, True),
    "bitwise_xor": (False, None),
}
"""The same for booleans."""
