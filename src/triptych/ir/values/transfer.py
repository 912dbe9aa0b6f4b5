"""The table of transfer functions, by operation, and the helpers that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..calls import Call
from ..facts import number, tensor_fact
from .affine import NEVER, Affine, Clause, Condition, both, condition, constant, either, index
from .elements import Elements, Leaf, boolean, cast, combinations, pieces, uniform

if TYPE_CHECKING:
    from .knowledge import Knowledge

Transfer = Callable[["Knowledge", Node, Call, torch.Tensor], "Elements | None"]

TRANSFER: dict[str, Transfer] = {}

FROM_NUMBERS: set[str] = set()
"""Operations whose result may be known although no tensor among their operands is: `full_like(x, 2)`."""


def of(*ops: str, from_numbers: bool = False) -> Callable[[Transfer], Transfer]:
    def register(transfer: Transfer) -> Transfer:
        for op in ops:
            TRANSFER[op] = transfer
        if from_numbers:
            FROM_NUMBERS.update(ops)
        return transfer

    return register


def operand(know: Knowledge, value: Any, result: torch.Tensor) -> Elements | None:
    """The known elements of an operand, broadcast to the shape of the result; a number is uniform."""
    fact = tensor_fact(value)
    if fact is not None:
        elements = know.elements(value)
        return None if elements is None else elements.broadcast(fact.shape, result.shape)
    value = number(value)
    if isinstance(value, (bool, float)):
        return uniform(torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.float64))
    return uniform(constant(value, result.dim())) if isinstance(value, (int, torch.SymInt)) else None


def compared(op: str, left: Elements, right: Elements, result: torch.Tensor) -> Elements | None:
    """A comparison of integers; None if an operand is a float."""
    shape, rank = result.shape, result.dim()
    truth = NEVER
    for where, leaves in combinations((left, right), shape):
        a, b = (as_integer(leaf, rank) for leaf in leaves)
        if a is None or b is None:
            return None
        truth = either(truth, both(where, holds(op, a, b, shape), shape), shape)
    return boolean(truth, shape)


def as_integer(leaf: Leaf, rank: int) -> Affine | None:
    if isinstance(leaf, Affine):
        return leaf
    return constant(int(leaf.item()), rank) if leaf.dtype == torch.bool else None


def holds(op: str, a: Affine, b: Affine, shape: Any) -> Condition:
    up, down = b - a, a - b
    clauses: dict[str, list[Clause]] = {
        "lt": [(up.plus(-1),)],
        "le": [(up,)],
        "gt": [(down.plus(-1),)],
        "ge": [(down,)],
        "eq": [(up, down)],
        "ne": [(up.plus(-1),), (down.plus(-1),)],
    }
    return condition(clauses[op], shape)


def is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype == torch.bool


def joined(parts: Any, dim: int, shape: Any, dtype: torch.dtype) -> Elements | None:
    rank = len(shape)
    result_pieces: list[tuple[Condition, Leaf]] = []
    before: Any = 0
    for elements, own in parts:
        if elements is None or own is None or own.dim() != rank:
            return None
        size = own.shape[dim]
        inside = condition(
            [(index(dim, rank).plus(-before), index(dim, rank).times(-1).plus(before + size - 1))], shape
        )
        places = [index(d, rank).plus(-before) if d == dim else index(d, rank) for d in range(rank)]
        seen = elements.through(lambda pattern, places=places: pattern.through(places, rank), shape)
        if seen is None:
            return None
        for where, leaf in seen.pieces:
            same = cast(leaf, dtype, shape)
            if same is None:
                return None
            result_pieces.append((both(where, inside, shape), same))
        before = before + size
    return pieces(result_pieces, shape)


def with_rank(leaf: Leaf, rank: int) -> Leaf:
    return constant(leaf.start, rank) if isinstance(leaf, Affine) else leaf


def cast_all(pairs: Any, result: torch.Tensor) -> Elements | None:
    parts = [(where, cast(leaf, result.dtype, result.shape)) for where, leaf in pairs]
    return None if any(leaf is None for _, leaf in parts) else pieces(parts, result.shape)  # type: ignore[arg-type]
