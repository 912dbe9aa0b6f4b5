"""Views as index maps: the index along each dim of the operand, in terms of the index of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from ..calls import Call
from ..canonical import index_steps
from ..facts import known, known_equal, number
from ..reshape import leading_groups
from .affine import Affine, Shape, constant, index, is_zero, stretched

Places = list[Affine | None]
"""None: the index along that dim is not affine, so only values that are constant along it can be mapped."""


def seen_through(call: Call, own: Shape, shape: Shape) -> Callable[[Affine], Affine | None] | None:
    """The function that maps patterns of the operand to those of the view; None if the operation is not supported."""
    if call.op in RESHAPES:
        return lambda pattern: reshaped(pattern, own, shape)
    make = MAPS.get(call.op)
    places = make(call.args, own, shape) if make is not None else None
    return None if places is None else lambda pattern: pattern.through(places, len(shape))


def _identity(args: dict[str, Any], own: Shape, shape: Shape) -> Places:
    return [index(d, len(own)) for d in range(len(own))]


def _permute(args: dict[str, Any], own: Shape, shape: Shape) -> Places:
    dims = list(args["dims"])
    return [index(dims.index(d), len(own)) for d in range(len(own))]


def _expand(args: dict[str, Any], own: Shape, shape: Shape) -> Places:
    """`expand`. In a `repeat`, dims of size one and dims that are not repeated behave as in an `expand`."""
    return stretched(own, shape)


def _slice(args: dict[str, Any], own: Shape, shape: Shape) -> Places:
    places = _identity(args, own, shape)
    dim = args.get("dim", 0)
    places[dim] = _sliced(args.get("start", 0), args.get("step", 1), own[dim], index(dim, len(own)))
    return places


def _sliced(start: Any, step: Any, size: Any, place: Affine) -> Affine | None:
    """The index of an element of a slice. Its end does not matter: a start beyond it leaves no element."""
    start, step = number(start), number(step)
    start, step = 0 if start is None else start, 1 if step is None else step
    if isinstance(start, float) or isinstance(step, float):
        return None
    if known(start < 0):
        start = size + start
    return place.times(step).plus(start) if known(start >= 0) else None


def _select(args: dict[str, Any], own: Shape, shape: Shape) -> Places:
    dim, at = args["dim"], number(args["index"])
    places: Places = [index(d - (d > dim), len(shape)) for d in range(len(own))]
    places[dim] = constant(at, len(shape)) if known(at >= 0) else None
    return places


def _flip(args: dict[str, Any], own: Shape, shape: Shape) -> Places:
    places = _identity(args, own, shape)
    for dim in args["dims"] if places else ():  # torch lets a number be flipped along its last dim
        places[dim] = index(dim, len(own)).times(-1).plus(own[dim] - 1)
    return places


def reshaped(pattern: Affine, own: Shape, shape: Shape) -> Affine | None:
    """A pattern seen through a reshape: a dim that is split is a sum of its parts, and n*i + j over (i, j) is k over
    the joined dim."""
    seen = constant(pattern.start, len(shape))
    groups = [
        ([d for d in mine if not known(own[d] == 1)], [d for d in theirs if not known(shape[d] == 1)])
        for mine, theirs in leading_groups(own, shape)
    ]
    for mine, theirs in groups:
        steps = [pattern.steps[d] for d in mine]
        if all(is_zero(s) for s in steps):
            continue
        inner = steps[-1]
        size: Any = 1
        for dim, step in zip(reversed(mine), reversed(steps)):
            if not known_equal(step, inner * size):
                return None
            size = size * own[dim]
        step = inner
        for dim in reversed(theirs):
            seen += index(dim, len(shape)).times(step)
            step = step * shape[dim]
    covered = {d for mine, _ in groups for d in mine}
    rest = [s for d, s in enumerate(pattern.steps) if d not in covered and not known(own[d] == 1)]
    return seen if all(is_zero(s) for s in rest) else None


def _basic_index(args: dict[str, Any], own: Shape, shape: Shape) -> Places | None:
    """Numbers, slices, None and `...`."""
    if index_steps(len(own), args["index"]) is None:
        return None
    entries = list(args["index"]) if isinstance(args["index"], tuple) else [args["index"]]
    indexed_dims = sum(e is not None and e is not Ellipsis for e in entries)
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    places: Places = []
    at = 0
    for entry in entries:
        if entry is Ellipsis:
            more = len(own) - indexed_dims
            places += [index(at + d, len(shape)) for d in range(more)]
            at += more
        elif entry is None:
            at += 1
        elif isinstance(entry, slice):
            places.append(_sliced(entry.start, entry.step, own[len(places)], index(at, len(shape))))
            at += 1
        else:
            place = entry + own[len(places)] if entry < 0 else entry
            places.append(constant(place, len(shape)))
    return places


def tensor_entries(indices: Sequence[Any], rank: int) -> tuple[list[Node], int] | None:
    """The adjacent tensor entries of an index, all other entries being whole dims, and the dim where they begin."""
    entries = [None if e == slice(None) else e for e in indices]
    if len(entries) > rank or not all(e is None or isinstance(e, Node) for e in entries):
        return None
    places_of = [i for i, e in enumerate(entries) if e is not None]
    if not places_of or places_of != list(range(places_of[0], places_of[-1] + 1)):
        return None
    return [e for e in entries if e is not None], places_of[0]


RESHAPES = ("reshape", "unsqueeze", "squeeze")

MAPS: dict[str, Callable[[dict[str, Any], Shape, Shape], Places | None]] = {
    **dict.fromkeys("alias detach clone contiguous lift_fresh_copy identity to".split(), _identity),
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "flip": _flip,
    "repeat": _expand,
    "tile": _expand,
    "tensor_getitem": _basic_index,
}
