"""What is known of masks and of what they fill in: single numbers, values that are never -inf, equal masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import fact, tensor_fact
from ..ir.program import Program
from ..ir.values import knowledge

MASKS = -9e3
"""What is filled with a number as low as this is meant to be masked."""
MARGIN = 128.0
"""A score that is lower than another by this has no weight beside it: exp(-128) is 0 in float32."""

SAME_ELEMENTS = frozenset(
    "clone detach expand reshape unsqueeze squeeze permute slice select contiguous repeat".split()
)


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number as a tensor of that dtype holds it."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def one_number(program: Program, value: Any) -> tuple[float, list[Node]] | None:
    """A number, or the one that all elements of a tensor are, and the nodes it is made by."""
    nodes: list[Node] = []
    dtypes: list[torch.dtype] = []
    while isinstance(value, Node):
        known_value, call = tensor_fact(value), program.call(value)
        if known_value is None or program.aliasing.written(value):
            return None
        nodes.append(value)
        dtypes.append(known_value.dtype)
        if call is not None and not call.mutates and (call.op == "to" or call.op in SAME_ELEMENTS):
            value = call.args["self"]
        elif call is not None and call.op in ("full", "full_like", "new_full"):
            value = call.args["fill_value"]
        elif call is not None and call.op == "scalar_tensor":
            value = call.args["s"]
        elif call is not None and call.op == "tensor" and isinstance(call.args["operands"][0], (int, float)):
            value = call.args["operands"][0]
        else:
            elements = knowledge(program).uniform(value)
            if elements is None:
                elements = knowledge(program).evaluate(value)
            if elements is None or not elements.numel() or not bool((elements == elements.flatten()[0]).all()):
                return None
            value = elements.flatten()[0].item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    for dtype in reversed(dtypes):
        number = rounded(number, dtype)
    return number, nodes


def never_infinite(program: Program, node: Node) -> bool:
    """Is a bias proved to hold no -inf and no NaN? So are those made of booleans and finite numbers."""
    numbers = levels(program, node)
    return numbers is not None and all(math.isfinite(n) for n in numbers)


def levels(program: Program, node: Any, depth: int = 12) -> set[float] | None:
    """All numbers that a bias may hold, if it is a choice between constants."""
    number = one_number(program, node) if not isinstance(node, bool) else None
    if number is not None:
        return {number[0]}
    call, tensor = program.call(node) if isinstance(node, Node) else None, tensor_fact(node)
    if call is None or tensor is None or call.mutates or depth == 0 or program.aliasing.written(node):
        return None
    if tensor.dtype == torch.bool:
        return {0.0, 1.0}
    if call.op == "to" or call.op in SAME_ELEMENTS:
        inner = levels(program, call.args["self"], depth - 1)
        if inner is None or not tensor.dtype.is_floating_point:
            return None
        return {rounded(n, tensor.dtype) for n in inner}
    if call.op == "where":
        parts = [levels(program, call.args[k], depth - 1) for k in ("self", "other")]
    elif call.op == "masked_fill":
        parts = [levels(program, call.args[k], depth - 1) for k in ("self", "value")]
    elif call.op in ("mul", "sub") and call.get("alpha") in (1, None) and tensor.dtype.is_floating_point:
        left, right = (levels(program, call.args[k], depth - 1) for k in ("self", "other"))
        if left is None or right is None or len(left) * len(right) > 8:
            return None
        numbers = {a * b if call.op == "mul" else a - b for a in left for b in right}
        return {rounded(n, tensor.dtype) for n in numbers}
    else:
        return None
    if any(part is None for part in parts):
        return None
    return {rounded(n, tensor.dtype) for part in parts for n in part or ()}


def same_value(program: Program, left: Any, right: Any, depth: int = 8) -> bool:
    """The same node, or the same operation on the same values."""
    if left is right:
        return True
    if not isinstance(left, Node) or not isinstance(right, Node):
        return type(left) is type(right) and not isinstance(left, (list, tuple, dict)) and bool(left == right)
    first, second = program.call(left), program.call(right)
    if first is None or second is None or first.op != second.op or first.mutates or depth == 0:
        return False
    aliasing = program.aliasing
    if any(aliasing.written(n) or not aliasing.effects(n).pure for n in (left, right)):
        return False
    if set(first.args) != set(second.args):
        return False
    return all(same_argument(program, first.args[k], second.args[k], depth - 1) for k in first.args)


def same_argument(program: Program, left: Any, right: Any, depth: int = 8) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same_argument(program, a, b, depth) for a, b in zip(left, right))
    return same_value(program, left, right, depth)


def negation(program: Program, mask: Node) -> tuple[Node, bool]:
    """A mask without the `~` before it, and whether there was an odd number of them."""
    negated = False
    while (call := program.call(mask)) is not None and call.op in ("bitwise_not", "logical_not") and not call.mutates:
        inner = call.args["self"]
        tensor = tensor_fact(inner)
        if tensor is None or tensor.dtype != torch.bool or any(map(program.aliasing.written, (mask, inner))):
            break
        mask, negated = inner, not negated
    return mask, negated


def is_number(value: Any) -> bool:
    """One number for all elements: Python's, or a symbolic one."""
    if isinstance(value, Node):
        value = fact(value)
        return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def keeps_a_key(program: Program, bias: Node, lowest: float) -> torch.Tensor | None:
    """Where a bias that depends on shapes alone is 0, if all else in it is `lowest` or less and each row has a 0."""
    elements = knowledge(program).evaluate(bias)
    if elements is None or not elements.numel() or elements.dim() < 2:
        return None
    kept = elements == 0
    is_mask = bool((kept | (elements <= lowest)).all()) and bool(kept.any(-1).all())
    return kept if is_mask else None


def is_lower_triangle(kept: torch.Tensor) -> bool:
    return kept.shape[-1] == kept.shape[-2] and bool(
        (kept == torch.ones(kept.shape[-2:], dtype=torch.bool).tril()).all()
    )
