"""Values that are equal because they are computed by the same operations."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..program import Program


def same_value(program: Program, left: Any, right: Any, depth: int = 8) -> bool:
    """The same node or constant, or the same pure operation on the same values."""
    if left is right:
        return True
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same_value(program, a, b, depth) for a, b in zip(left, right))
    if not isinstance(left, Node) or not isinstance(right, Node):
        return type(left) is type(right) and not isinstance(left, dict) and bool(left == right)
    first, second = program.call(left), program.call(right)
    if first is None or second is None or first.op != second.op or first.mutates or depth == 0:
        return False
    aliasing = program.aliasing
    if any(aliasing.written(n) or not aliasing.effects(n).pure for n in (left, right)):
        return False
    return first.args.keys() == second.args.keys() and all(
        same_value(program, first.args[k], second.args[k], depth - 1) for k in first.args
    )
