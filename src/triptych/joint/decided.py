"""Operations that the values of their operands decide: part of `constant_fold_uniform_value`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known_equal, tensor_fact
from ..ir.values.affine import Affine
from ..ir.values.ranges import representable
from ..rewrite.emit import Emitter

if TYPE_CHECKING:
    from .constant_fold_uniform_value import Folder


def simplify(folder: Folder, node: Node, call: Call, result: torch.Tensor) -> None:
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


def _with_one_number(folder: Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    left, right = call.args.get("self"), call.args.get("other")
    integers = not result.dtype.is_floating_point
    if left is right and isinstance(left, Node) and integers and call.op in WITH_ITSELF:
        what = "with_itself"
        if WITH_ITSELF[call.op] is None:
            folder.replace(what, node, lambda op: folder.as_result(op, node, left, result))
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
    folder: Folder, node: Node, call: Call, operand: Node, number: bool | int | float, result: torch.Tensor
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
        folder.replace(what, node, lambda op: folder.as_result(op, node, operand, result))
    elif absorbing is not None and number == absorbing:
        if call.op == "mul" and not exact:
            folder.run.declined("multiply_by_zero", node, "0 times NaN or infinity is NaN")
            return
        folder.dropping("absorb", node, operand, lambda op: folder.full(op, node, absorbing))


def _may_drop_zero(folder: Folder, op: str, operand: Node, number: bool | int | float) -> bool:
    added = math.copysign(1, number) * (-1 if op == "sub" else 1)
    return added < 0 or folder.know.never_negative_zero(operand)


def _choose(folder: Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """A mask that is true everywhere, or false, picks one side; a mask turned into booleans is itself."""
    mask = call.args.get("condition", call.args.get("mask"))
    fact = tensor_fact(mask)
    if not isinstance(mask, Node) or fact is None or fact.dtype != torch.bool:
        return
    yes, no = (call.args.get(b) for b in (("self", "other") if call.op == "where" else ("value", "self")))
    if folder.know.is_all_true(mask):
        _keep_side(folder, node, yes, no, result)
        return
    if folder.know.is_all_false(mask):
        _keep_side(folder, node, no, yes, result)
        return
    if result.dtype == torch.bool:
        numbers = folder.number(yes), folder.number(no)
        if numbers == (True, False):
            folder.replace("choose_truth", node, lambda op: folder.as_result(op, node, mask, result))
        elif numbers == (False, True):
            folder.replace(
                "choose_truth",
                node,
                lambda op: op.expand(op.logical_not(folder.program.value(mask)), list(result.shape)),
            )


def _keep_side(folder: Folder, node: Node, kept: Any, dropped: Any, result: torch.Tensor) -> None:
    if isinstance(kept, Node) and tensor_fact(kept) is not None:
        folder.dropping("choose_branch", node, dropped, lambda op: folder.as_result(op, node, kept, result))
    elif isinstance(kept, (bool, int, float)):
        folder.dropping("choose_branch", node, dropped, lambda op: folder.full(op, node, kept))


def _within_bounds(folder: Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """A clamp whose bounds all elements are within; a maximum or minimum of which one side always wins."""
    operand: Any = call.args.get("self")
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
        folder.replace("within_bounds", node, lambda op: folder.as_result(op, node, operand, result))


def _respects(folder: Folder, operand: Node, name: str, bound: Any, dtype: torch.dtype) -> bool:
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not representable(bound, dtype):
        return False
    about = folder.know.interval(operand)
    inside = about.low >= bound if name == "min" else about.high <= bound
    if bound != 0 or not dtype.is_floating_point:
        return inside
    # a bound of zero may give a zero its own sign
    return inside and name == "min" and math.copysign(1, bound) > 0 and folder.know.never_negative_zero(operand)


def _one_side_wins(folder: Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    left: Any = call.args.get("self")
    right: Any = call.args.get("other")
    facts = [tensor_fact(left), tensor_fact(right)]
    if any(f is None or f.dtype != result.dtype or f.dtype.is_floating_point for f in facts):
        return  # a float may be NaN, and then it wins
    a, b = folder.know.interval(left), folder.know.interval(right)
    larger = left if a.low >= b.high else right if b.low >= a.high else None
    if larger is None:
        return
    winner = larger if call.op == "maximum" else (right if larger is left else left)
    loser = right if winner is left else left
    folder.dropping("within_bounds", node, loser, lambda op: folder.as_result(op, node, winner, result))


def _compare_with_truth(folder: Folder, node: Node, call: Call, result: torch.Tensor) -> None:
    """keep == True is keep, keep == False is not keep; an integer is equal to itself."""
    left: Any = call.args.get("self")
    right: Any = call.args.get("other")
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
        folder.replace("compare_with_truth", node, lambda op: folder.as_result(op, node, left, result))
    elif known_equal(found.shape, result.shape):
        folder.replace("compare_with_truth", node, lambda op: op.logical_not(value))


def _fold_to_arange(folder: Folder, node: Node, result: torch.Tensor) -> None:
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
