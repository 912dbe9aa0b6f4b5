"""Along which dim data is gathered or scattered.

A collective gathers and scatters along dim 0. For another dim, functional collectives rearrange its result, or its
operand: `cat(split(gathered, ...), dim)`, or the same as a view, a permutation and a copy.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import tensor_fact, tensor_of
from ..ir.program import Program

RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "detach"))
"""Operations that leave the elements of a contiguous tensor in their order."""


@dataclass(frozen=True)
class Arrangement:
    """The tensor `value`, seen as a tensor of this shape, is gathered or scattered along this dim of it."""

    value: Node
    shape: tuple[int, ...]
    """For a gather, the shape of one rank's part; for a scatter, that of the whole tensor."""
    dim: int
    inner: tuple[Node, ...] = ()
    """The nodes between the collective and the value."""


def gathered(program: Program, wait: Node, shard: Node, ranks: int) -> Arrangement:
    """How the result of an all-gather, given by its wait, is rearranged before it is used."""
    shape = tuple(tensor_of(shard).shape)
    plain = Arrangement(wait, shape, 0)
    user = only_user(wait)
    if user is None:
        return plain
    if (pieces := _pieces_of_split(program, user, 0, ranks)) is not None:
        cat = _joined(program, pieces)
        dim = None if cat is None else _dim_of_cat(program, cat)
        return plain if cat is None or not dim else Arrangement(cat, shape, dim, (user, *pieces))
    permute = only_user(user)
    copy = None if permute is None else only_user(permute)
    if permute is None or copy is None or not is_reshape(program, user) or not _is_copy(program, copy):
        return plain
    viewed, dims = tuple(tensor_of(user).shape), _permutation(program, permute)
    moved = 0 if dims is None else dims.index(0)
    if not moved or viewed[0] != ranks or dims != [*range(1, moved + 1), 0, *range(moved + 1, len(viewed))]:
        return plain
    return Arrangement(copy, viewed[1:], moved, (user, permute))


def scattered(program: Program, operand: Node, ranks: int) -> Arrangement | None:
    """The tensor that a reduce-scatter scatters, before it is rearranged for dim 0.

    None if a value on the way has other users, or if the rearrangement is not one of those that are known.
    """
    inner: list[Node] = []
    node = operand
    while True:
        if len(node.users) != 1:
            return None
        call = program.call(node)
        if call is not None and is_reshape(program, node):
            inner.append(node)
            node = call.args["self"]
        elif call is not None and _is_copy(program, node):
            return _permuted(program, node, tuple(inner), ranks)
        elif call is not None and call.op == "cat" and not _dim_of_cat(program, node):
            return _from_pieces(program, node, tuple(inner), ranks)
        else:
            return Arrangement(node, tuple(tensor_of(node).shape), 0, tuple(inner))


def _permuted(program: Program, copy: Node, inner: tuple[Node, ...], ranks: int) -> Arrangement | None:
    """copy(permute(x)), where the permutation moves a dim whose size is the number of ranks to the front"""
    permute = _operand(program, copy)
    source = None if permute is None else _operand(program, permute)
    dims = None if permute is None else _permutation(program, permute)
    if permute is None or source is None or dims is None or len(permute.users) != 1 or len(source.users) != 1:
        return None
    shape, front = tuple(tensor_of(source).shape), dims[0]
    if front == 0 or shape[front] != ranks or dims[1:] != [d for d in range(len(shape)) if d != front]:
        return None
    return Arrangement(source, shape, front, (*inner, copy, permute))


def _from_pieces(program: Program, cat: Node, inner: tuple[Node, ...], ranks: int) -> Arrangement | None:
    pieces: Any = cat.args[0]
    first: Any = pieces[0] if isinstance(pieces, (list, tuple)) and pieces else None
    if not isinstance(first, Node) or first.target is not operator.getitem:
        return None
    split: Any = first.args[0]
    call = program.call(split)
    dim = call.get("dim") if call is not None else None
    if call is None or not isinstance(dim, int) or list(_pieces_of_split(program, split, dim, ranks) or ()) != pieces:
        return None
    source: Node = call.args["self"]
    if len(source.users) != 1 or any(len(piece.users) != 1 for piece in pieces):
        return None
    return Arrangement(source, tuple(tensor_of(source).shape), dim, (*inner, cat, *pieces, split))


def _pieces_of_split(program: Program, split: Node, dim: int, ranks: int) -> tuple[Node, ...] | None:
    """The parts of a tensor that is split into equal parts, one per rank, in order; None if it is not."""
    call = program.call(split)
    if call is None or call.op not in ("split", "split_with_sizes", "chunk") or call.get("dim") != dim:
        return None
    pieces = [user for user in split.users if user.target is operator.getitem]
    parts = {piece.args[1]: piece for piece in pieces}
    if len(pieces) != len(split.users) or sorted(map(str, parts)) != sorted(map(str, range(ranks))):
        return None
    sizes = {tuple(tensor_of(piece).shape) for piece in pieces}
    whole = tensor_fact(call.args["self"])
    even = whole is not None and len(sizes) == 1 and next(iter(sizes))[dim] * ranks == whole.shape[dim]
    return tuple(parts[i] for i in range(ranks)) if even else None


def _joined(program: Program, pieces: tuple[Node, ...]) -> Node | None:
    """The concatenation of exactly these parts, in order, if nothing else uses them."""
    cat = only_user(pieces[0])
    call = None if cat is None else program.call(cat)
    if cat is None or call is None or call.op != "cat" or list(cat.args[0]) != list(pieces):  # type: ignore[arg-type]
        return None
    return cat if all(only_user(piece) is cat for piece in pieces) else None


def _dim_of_cat(program: Program, cat: Node) -> int:
    call = program.call(cat)
    return call.get("dim") if call is not None else 0


def is_reshape(program: Program, node: Node, other_dtype: bool = False) -> bool:
    """Is it a view that keeps the order of the elements? With `other_dtype` it may also read their bytes as another
    dtype of the same size, as 8-bit floats are communicated as integers."""
    call = program.call(node)
    if call is None or call.op not in RESHAPES or not isinstance(call.args.get("self"), Node) or call.mutates:
        return False
    before, after = tensor_of(call.args["self"]).dtype, tensor_of(node).dtype
    return before == after or (other_dtype and before.itemsize == after.itemsize)


def _is_copy(program: Program, node: Node) -> bool:
    """Is it a contiguous copy of a permutation?"""
    call = program.call(node)
    if call is None or call.op not in ("clone", "contiguous") or not tensor_of(node).is_contiguous():
        return False
    source = program.call(call.args["self"])
    return source is not None and source.op == "permute"


def _permutation(program: Program, node: Node) -> list[int] | None:
    call = program.call(node)
    if call is None or call.op != "permute":
        return None
    return [d % tensor_of(node).dim() for d in call.args["dims"]]


def _operand(program: Program, node: Node) -> Node | None:
    call = program.call(node)
    operand = None if call is None else call.args.get("self")
    return operand if isinstance(operand, Node) else None


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def rows(shape: tuple[int, ...]) -> int:
    """How many rows a tensor has as a matrix whose columns are its last dim."""
    return torch.Size(shape[:-1]).numel()
