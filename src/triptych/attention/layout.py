"""Where the axes of the scores are: queries, keys, and everything else, through views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.reshape import Groups, reshape_groups
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused


@dataclass(frozen=True)
class Layout:
    """The axes of a tensor that holds one number for each query and key."""

    batch: tuple[int, ...]
    """Dims that are neither queries nor keys, in the order in which Q and K have them: always ascending."""
    query: int | None
    """None: there is one query, and no axis for it."""
    key: int

    @property
    def rank(self) -> int:
        return len(self.order)

    @property
    def order(self) -> list[int]:
        return [*self.batch, *([] if self.query is None else [self.query]), self.key]


@dataclass(frozen=True)
class BatchStep:
    """How a view of the scores changes their batch axes; those of Q, K and V must be changed in the same way."""

    sizes: tuple[Any, ...] | None = None
    order: tuple[int, ...] | None = None


VIEWS = ("permute", "reshape", "unsqueeze", "squeeze")


def viewed(program: Program, layout: Layout, before: Node, node: Node) -> tuple[Layout, BatchStep | None]:
    """The layout after one view, and how the view changes the batch axes."""
    call = program.call(node)
    assert call is not None
    if call.op == "permute":
        return permuted(layout, call.args["dims"])
    if call.op == "unsqueeze":
        return unsqueezed(layout, call.args["dim"] % (layout.rank + 1), _shape(node))
    return reshaped(layout, _shape(before), _shape(node))


def _shape(node: Node) -> list[Any]:
    tensor = tensor_fact(node)
    if tensor is None:
        raise Refused("shapes are not known")
    return list(tensor.shape)


def permuted(layout: Layout, dims: Sequence[int]) -> tuple[Layout, BatchStep | None]:
    place = {old: new for new, old in enumerate(dims)}
    batch = tuple(place[d] for d in layout.batch)
    query = None if layout.query is None else place[layout.query]
    in_order = tuple(sorted(range(len(batch)), key=lambda i: batch[i]))
    moved = Layout(tuple(sorted(batch)), query, place[layout.key])
    return moved, None if in_order == tuple(range(len(in_order))) else BatchStep(order=in_order)


def unsqueezed(layout: Layout, dim: int, new: Sequence[Any]) -> tuple[Layout, BatchStep]:
    def moved(d: int) -> int:
        return d + (d >= dim)

    batch = tuple(sorted([*map(moved, layout.batch), dim]))
    query = None if layout.query is None else moved(layout.query)
    return Layout(batch, query, moved(layout.key)), BatchStep(sizes=tuple(new[d] for d in batch))


def reshaped(layout: Layout, old: Sequence[Any], new: Sequence[Any]) -> tuple[Layout, BatchStep]:
    """The layout after a reshape that leaves the axes of queries and keys alone."""
    query = layout.query
    axes = [d for d in (query, layout.key) if d is not None]
    places: dict[int, int] = {}
    batch: list[int] = []
    for before, after in groups(old, new):
        own = [d for d in axes if d in before]
        if not own:
            batch += after
            continue
        real = [d for d in before if d in own or not known(old[d] == 1)]
        wanted = [d for d in after if not known(new[d] == 1)]
        if len(own) == 2 and sorted(own) == real and known(old[own[0]] == 1) and query is not None and len(wanted) == 1:
            query, places[layout.key] = None, wanted[0]  # one query, and now no axis for it
            batch += [d for d in after if d != wanted[0]]
            continue
        if len(real) != 1 or len(wanted) > 1 or not after:
            raise Refused("a reshape mixes the axes of queries or keys with others")
        places[own[0]] = wanted[0] if wanted else after[-1]
        batch += [d for d in after if d != places[own[0]]]
    query = None if query is None else places[query]
    return Layout(tuple(batch), query, places[layout.key]), BatchStep(sizes=tuple(new[d] for d in batch))


def groups(old: Sequence[Any], new: Sequence[Any]) -> Groups:
    """Dims before and after a reshape that hold the same elements."""
    if any(known(s == 0) for s in (*old, *new)):
        raise Refused("a reshape of nothing")
    parts = reshape_groups(old, new)
    if parts is None:
        raise Refused("a reshape that cannot be followed")
    return parts


def aligned(op: Emitter, value: Value, layout: Layout) -> Value:
    value = padded(op, value, layout.rank)
    if layout.order != sorted(layout.order):
        value = op.permute(value, layout.order)
    return value if layout.query is not None else op.unsqueeze(value, value.rank - 1)


def padded(op: Emitter, value: Value, rank: int) -> Value:
    """The value with leading axes of size one, as broadcasting adds them."""
    if value.rank == rank:
        return value
    return op.reshape(value, [*[1] * (rank - value.rank), *value.shape])


def reshaped_along(op: Emitter, value: Value, old: Sequence[Any], new: Sequence[Any]) -> Value:
    """A value that broadcasts to scores of shape `old`, reshaped so that it broadcasts to scores that are reshaped to
    `new`; it is expanded where the reshape mixes its axes."""
    value = padded(op, value, len(old))
    sizes = list(value.shape)
    shape: list[Any] = []
    for before, after in groups(old, new):
        if all(known(sizes[d] == 1) for d in before):
            shape += [1] * len(after)
        elif len(before) == len(after) == 1:
            shape.append(sizes[before[0]])
        else:
            for d in before:
                sizes[d] = old[d]
            shape += [new[d] for d in after]
    if not known_equal(sizes, value.shape):
        value = op.expand(value, sizes)
    return value if known_equal(shape, value.shape) else op.reshape(value, shape)
