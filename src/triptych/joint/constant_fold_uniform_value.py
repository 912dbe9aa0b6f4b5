"""Tensors that hold one value become `full`, and operations that their operands' values decide vanish.

What values hold is asked of `ir/values.py`: one number, a pattern of the index, a range. Integers and booleans fold
freely. Floats fold as IEEE allows: x*0 stays (NaN and infinity give NaN), x+0.0 goes only where no element can be -0.0
(-0.0 + 0.0 is 0.0), a clamp goes only where no bound is a zero whose sign could show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.affine import Affine
from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import TORCH
from ..ir.ranges import representable
from ..ir.traits import is_reduction, is_view
from ..ir.values import Knowledge, knowledge
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


class _Folder:
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

    def as_result(self, op: Emitter, operand: Node, result: torch.Tensor) -> Any:
        """The operand in the dtype and shape that the operation gave it."""
        found = tensor_fact(operand)
        value: Any = self.program.value(operand)
        if found is not None and found.dtype != result.dtype:
            value = op.to(value, dtype=result.dtype)
        if found is not None and not known_equal(found.shape, result.shape):
            value = op.expand(value, list(result.shape))
        return value


# ---- one operation whose operands decide it ----


def simplify(folder: _Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """The first of the following that knows this operation."""
    if result.dtype.is_complex:
        return
    if call.op in ("where", "masked_fill"):
        _choose(folder, node, call, result)
    elif call.op in ("clamp", "relu", "abs", "maximum", "minimum"):
        _within_bounds(folder, node, call, result)
    elif call.op in IDENTITIES and "alpha" not in call.args:
        _with_one_number(folder, node, call, result)
    elif call.op in ("eq", "ne"):
        _compare_with_truth(folder, node, call, result)
    elif call.op in PATTERNED:
        _fold_to_arange(folder, node, result)


def _with_one_number(folder: _Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    left, right = call.args.get("self"), call.args.get("other")
    integers = not result.dtype.is_floating_point
    if left is right and isinstance(left, Node) and integers and call.op in WITH_ITSELF:
        what = "with_itself"
        if WITH_ITSELF[call.op] is None:
            folder.replace(what, node, lambda op: folder.as_result(op, left, result))
        else:
            folder.dropping(what, node, left, lambda op: folder.full(op, node, WITH_ITSELF[call.op]))
        return
    for operand, other in ((left, right), (right, left)):
        if operand is right and call.op not in COMMUTES:
            continue
        number = folder.number(other)
        if isinstance(operand, Node) and tensor_fact(operand) is not None and number is not None:
            _with_number(folder, node, call, operand, number, result)
            return


def _with_number(
    folder: _Folder, node: Node, call: Call, operand: Node, number: bool | int | float, result: torch.Tensor
) -> None:
    what, neutral, absorbing = IDENTITIES[call.op]
    exact = not result.dtype.is_floating_point
    if not exact and (call.op in INTEGERS_ONLY or call.op == "div" and "rounding_mode" in call.args):
        return
    if call.op in BITWISE and result.dtype == torch.bool:
        neutral, absorbing = BITWISE[call.op]
    if call.op == "remainder" and abs(number) == 1:
        folder.dropping("absorb", node, operand, lambda op: folder.full(op, node, 0))
    elif neutral is not None and number == neutral:
        if call.op in ("add", "sub") and not exact and not _may_drop_zero(folder, call.op, operand, number):
            folder.run.declined(what, node, "the value may hold -0.0, which adding 0.0 turns into 0.0")
            return
        folder.replace(what, node, lambda op: folder.as_result(op, operand, result))
    elif absorbing is not None and number == absorbing:
        if call.op == "mul" and not exact:
            folder.run.declined("multiply_by_zero", node, "0 times NaN or infinity is NaN")
            return
        folder.dropping("absorb", node, operand, lambda op: folder.full(op, node, absorbing))


def _may_drop_zero(folder: _Folder, op: str, operand: Node, number: bool | int | float) -> bool:
    added = math.copysign(1, number) * (-1 if op == "sub" else 1)
    return added < 0 or folder.know.never_negative_zero(operand)


def _choose(folder: _Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """A mask that is true everywhere, or false, picks one side; a mask turned into booleans is itself."""
    mask = call.args.get("condition", call.args.get("mask"))
    fact = tensor_fact(mask)
    if not isinstance(mask, Node) or fact is None or fact.dtype != torch.bool:
        return
    sides = [call.args.get(b) for b in (("self", "other") if call.op == "where" else ("value", "self"))]
    if folder.know.is_all_true(mask):
        _keep_side(folder, node, *sides, result)
        return
    if folder.know.is_all_false(mask):
        _keep_side(folder, node, *sides[::-1], result)
        return
    if result.dtype == torch.bool:
        yes, no = (folder.number(s) for s in sides)
        if (yes, no) == (True, False):
            folder.replace("choose_truth", node, lambda op: folder.as_result(op, mask, result))
        elif (yes, no) == (False, True):
            folder.replace(
                "choose_truth",
                node,
                lambda op: op.expand(op.logical_not(folder.program.value(mask)), list(result.shape)),
            )


def _keep_side(folder: _Folder, node: Node, kept: Any, dropped: Any, result: torch.Tensor) -> None:
    if isinstance(kept, Node) and tensor_fact(kept) is not None:
        folder.dropping("choose_branch", node, dropped, lambda op: folder.as_result(op, kept, result))
    elif isinstance(kept, (bool, int, float)):
        folder.dropping("choose_branch", node, dropped, lambda op: folder.full(op, node, kept))


def _within_bounds(folder: _Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """A clamp whose bounds all elements are within; a maximum or minimum of which one side always wins."""
    operand = call.args.get("self")
    found = tensor_fact(operand)
    if found is None or found.dtype != result.dtype:
        return
    if call.op in ("maximum", "minimum"):
        _one_side_wins(folder, node, call, result)
        return
    if call.op == "abs" or call.op == "relu":
        bounds: dict[str, Any] = {"min": 0}
    else:
        bounds = {k: folder.number(v) for k, v in call.args.items() if k in ("min", "max") and v is not None}
    if all(_respects(folder, operand, name, bound, result.dtype) for name, bound in bounds.items()):
        folder.replace("within_bounds", node, lambda op: folder.as_result(op, operand, result))


def _respects(folder: _Folder, operand: Node, name: str, bound: Any, dtype: torch.dtype) -> bool:
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not representable(bound, dtype):
        return False
    about = folder.know.interval(operand)
    inside = about.low >= bound if name == "min" else about.high <= bound
    if bound != 0 or not dtype.is_floating_point:
        return inside
    # a bound of zero may give a zero its own sign
    return inside and name == "min" and math.copysign(1, bound) > 0 and folder.know.never_negative_zero(operand)


def _one_side_wins(folder: _Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    left, right = call.args.get("self"), call.args.get("other")
    facts = [tensor_fact(left), tensor_fact(right)]
    if any(f is None or f.dtype != result.dtype or f.dtype.is_floating_point for f in facts):
        return  # a float may be NaN, and then it wins
    a, b = folder.know.interval(left), folder.know.interval(right)
    larger = left if a.low >= b.high else right if b.low >= a.high else None
    if larger is None:
        return
    winner = larger if call.op == "maximum" else (right if larger is left else left)
    loser = right if winner is left else left
    folder.dropping("within_bounds", node, loser, lambda op: folder.as_result(op, winner, result))


def _compare_with_truth(folder: _Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """keep == True is keep, keep == False is not keep; an integer is equal to itself."""
    left, right = call.args.get("self"), call.args.get("other")
    found = tensor_fact(left)
    if found is None:
        return
    if left is right and not found.dtype.is_floating_point and not found.dtype.is_complex:
        folder.dropping("with_itself", node, left, lambda op: folder.full(op, node, call.op == "eq"))
        return
    number = folder.number(right)
    if found.dtype != torch.bool or number not in (0, 1):
        return
    value = folder.program.value(left)
    if bool(number) == (call.op == "eq"):
        folder.replace("compare_with_truth", node, lambda op: folder.as_result(op, left, result))
    elif known_equal(found.shape, result.shape):
        folder.replace("compare_with_truth", node, lambda op: op.logical_not(value))


def _fold_to_arange(folder: _Folder, node: Node, result: torch.Tensor) -> None:
    """A scan, a gather or a difference whose result counts along one dim is an `arange`."""
    held = folder.know.elements(node)
    leaf = held.only if held is not None else None
    if not isinstance(leaf, Affine) or type(leaf.start) is not int:
        return
    dims = [d for d, s in enumerate(leaf.steps) if type(s) is not int or s != 0]
    if len(dims) != 1 or type(step := leaf.steps[dims[0]]) is not int:
        return
    (dim,) = dims
    size = result.shape[dim]

    def make(op: Emitter) -> Any:
        if isinstance(size, int):
            counted = op.arange(leaf.start, leaf.start + size * step, step, dtype=result.dtype, device=result.device)
        else:
            counted = op.arange(size, dtype=result.dtype, device=result.device)
            counted = counted if step == 1 else op.mul(counted, step)
            counted = counted if leaf.start == 0 else op.add(counted, leaf.start)
        if result.dim() == 1:
            return counted
        shape = [size if d == dim else 1 for d in range(result.dim())]
        return op.expand(op.reshape(counted, shape), list(result.shape))

    folder.replace("fold_to_arange", node, make)


COMMUTES = frozenset("add mul logical_and logical_or bitwise_and bitwise_or bitwise_xor".split())

IDENTITIES: dict[str, tuple[str, Any, Any]] = {
    "add": ("add_zero", 0, None),
    "sub": ("subtract_zero", 0, None),
    "mul": ("multiply_by_one", 1, 0),
    "div": ("divide_by_one", 1, None),
    "floor_divide": ("divide_by_one", 1, None),
    "remainder": ("absorb", None, None),
    "logical_and": ("and_true", True, False),
    "logical_or": ("or_false", False, True),
    "bitwise_and": ("and_ones", -1, 0),
    "bitwise_or": ("or_zero", 0, None),
    "bitwise_xor": ("xor_zero", 0, None),
}
"""What the change is called, the number that changes nothing, and the number that leaves nothing else."""

INTEGERS_ONLY = ("floor_divide", "remainder")

BITWISE: dict[str, tuple[Any, Any]] = {
    "bitwise_and": (True, False),
    "bitwise_or": (False, True),
    "bitwise_xor": (False, None),
}
"""The same for booleans."""

WITH_ITSELF: dict[str, Any] = {"sub": 0, "bitwise_xor": 0, "bitwise_and": None, "bitwise_or": None}
"""What an integer or boolean makes of itself: a number, or None for the operand unchanged."""

PATTERNED = frozenset("cumsum diff index index_select gather cat flip repeat".split())
"""Operations that read memory or scan it: counting is cheaper. Others are computed where they are used."""
