"""Reads from a graph which index map of which source a value is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.canonical import index_steps
from ..ir.facts import fact, known, known_equal, number, tensor_fact
from ..ir.program import Program
from .index_map import IndexMap

TAKING = frozenset(["split", "unbind", "slice", "select"])
"""Operations that take pieces of a value."""
SEEING = frozenset(["reshape", "permute", "squeeze", "unsqueeze", "expand"])
"""View operations whose result has all elements of the value."""
COPYING = frozenset(["clone", "contiguous", "flip"])
"""Operations that copy all elements of a value, in the same or in another order."""
EVERYTHING = TAKING | SEEING | COPYING

LONGEST_WAY = 16
"""Search budget: operations followed from one value. Keeps reading linear in the size of the graph."""

Step = Callable[[IndexMap], "IndexMap | None"]


@dataclass(frozen=True, eq=False)
class Way:
    """How a value is derived from its source."""

    map: IndexMap
    ops: frozenset[str]
    nodes: tuple[Node, ...]
    """All nodes on the way, the value itself first, without the source."""

    @property
    def source(self) -> Node:
        return self.map.source


@dataclass(frozen=True, eq=False)
class _Link:
    op: str
    operand: Node
    step: Step
    nodes: tuple[Node, ...]


def way_of(
    program: Program, node: Node, through: frozenset[str] = EVERYTHING, ends: frozenset[str] = TAKING
) -> Way | None:
    """The way from a value back to the source that it is a piece of. A value that is not a piece is its own source;
    None if its shape is not known.

    A source is always the operand of an operation in `ends`: `x.view(4, 8).chunk(2)` has pieces of the view, not of x.
    """
    links: list[_Link] = []
    at = node
    while len(links) < LONGEST_WAY and (link := _link(program, at, through)) is not None:
        links.append(link)
        at = link.operand
    while True:
        while links and links[-1].op not in ends:
            links.pop()
        way = _followed(node, links)
        if not isinstance(way, int):
            return way
        links = links[:way]


def _followed(node: Node, links: list[_Link]) -> Way | int | None:
    """The way over all links. If one of them gives no index map, the number of links between it and the value."""
    source = links[-1].operand if links else node
    known_source = readable(source)
    if known_source is None:
        return len(links) - 1 if links else None
    current = IndexMap.whole(source, known_source.shape)
    for i in reversed(range(len(links))):
        following = links[i].step(current)
        result = tensor_fact(links[i].nodes[0])
        if following is None or result is None or not known_equal(following.shape, tuple(result.shape)):
            return i
        current = following
    nodes = tuple(n for link in links for n in link.nodes)
    return Way(current, frozenset(link.op for link in links), nodes)


def readable(node: Any) -> torch.Tensor | None:
    """The fact of a strided tensor that is not quantized; None for any other value."""
    value = tensor_fact(node)
    return value if value is not None and value.layout is torch.strided and not value.is_quantized else None


def _link(program: Program, node: Node, through: frozenset[str]) -> _Link | None:
    call = program.call(node)
    operand = None if call is None else call.args.get("self")
    if call is None or call.mutates or not isinstance(operand, Node):
        return None
    if call.op == "getitem":
        return _piece(program, node, operand, call.args["index"], through)
    if call.op == "tensor_getitem":
        return _index(node, operand, call.args["index"], through)
    if call.op not in through or call.op not in STEPS:
        return None
    step = STEPS[call.op](node, call)
    return None if step is None else _Link(call.op, operand, step, (node,))


def _piece(program: Program, node: Node, whole: Node, index: Any, through: frozenset[str]) -> _Link | None:
    """An element of a split or an unbind."""
    call = program.call(whole)
    if call is None or call.op not in ("split", "unbind") or call.op not in through or not isinstance(index, int):
        return None
    parts, dim = fact(whole), call.get("dim")
    if parts is None or not -len(parts) <= index < len(parts):
        return None
    index %= len(parts)
    if call.op == "unbind":
        step: Step = lambda m: m.select(dim, index)  # noqa: E731
    else:
        start, size = starts(program, whole, dim)[index], parts[index].shape[dim]
        step = lambda m: m.slice(dim, start, size)  # noqa: E731
    return _Link(call.op, call.args["self"], step, (node, whole))


def starts(program: Program, split: Node, dim: int) -> list[Any]:
    """Where each piece of a split begins."""
    if split not in program.notes:
        program.notes[split] = list(itertools.accumulate((p.shape[dim] for p in fact(split)), initial=0))
    return program.notes[split]


def _index(node: Node, operand: Node, index: Any, through: frozenset[str]) -> _Link | None:
    """`x[:, 0, None, 1:3]`: several steps at once."""
    value = readable(operand)
    entries = None if value is None else index_steps(value.dim(), index)
    if value is None or entries is None or not {"slice", "select"} <= through:
        return None
    bounds = [b for _, e in entries if isinstance(e, slice) for b in (e.start, e.stop, e.step)]
    if not all(isinstance(n, int) for n in value.shape) or not all(isinstance(b, (int, type(None))) for b in bounds):
        return None
    takes = any(e is not None for _, e in entries)

    def step(m: IndexMap) -> IndexMap | None:
        current: IndexMap | None = m
        for dim, entry in entries:
            if current is None:
                return None
            size = current.shape[dim] if entry is not None else 0
            if entry is None:
                current = current.unsqueeze(dim)
            elif isinstance(entry, slice):
                places = range(*entry.indices(size))
                current = current.slice(dim, places.start, len(places), places.step)
            else:
                current = current.select(dim, entry % size)
        return current

    return _Link("slice" if takes else "unsqueeze", operand, step, (node,))


# ---- for each operation its effect on an index map; None where its arguments are not known ----


def _result_shape(node: Node) -> tuple[Any, ...] | None:
    value = readable(node)
    return None if value is None else tuple(value.shape)


def _slice(node: Node, call: Call) -> Step | None:
    dim, start, step, shape = call.get("dim"), number(call.get("start")), number(call.get("step")), _result_shape(node)
    size = getattr(tensor_fact(call.args["self"]), "shape", (None,) * (dim + 1))[dim]
    if shape is None or size is None or start is None or not known(step > 0):
        return None
    if known(start < 0):  # counted from the end, with a symbolic size
        start = size + start
    if not known(start >= 0) or not known(start <= size):
        return None
    return lambda m: m.slice(dim, start, shape[dim], step)


def _select(node: Node, call: Call) -> Step | None:
    index = number(call.args["index"])
    return (lambda m: m.select(call.get("dim"), index)) if index is not None and known(index >= 0) else None


def _reshape(node: Node, call: Call) -> Step | None:
    shape = _result_shape(node)
    return None if shape is None else lambda m: m.reshape(shape)


def _expand(node: Node, call: Call) -> Step | None:
    shape = _result_shape(node)
    return None if shape is None else lambda m: m.expand(shape)


def _permute(node: Node, call: Call) -> Step | None:
    dims = call.args["dims"]
    return (lambda m: m.permute(dims)) if _are_ints(dims) else None


def _flip(node: Node, call: Call) -> Step | None:
    dims = call.args["dims"]
    return (lambda m: m.flip(dims)) if _are_ints(dims) else None


def _unsqueeze(node: Node, call: Call) -> Step | None:
    dim = call.args["dim"]
    return (lambda m: m.unsqueeze(dim)) if isinstance(dim, int) else None


def _squeeze(node: Node, call: Call) -> Step | None:
    dims = call.get("dim")
    if dims is not None and not _are_ints(dims):
        return None
    return lambda m: m.squeeze(range(len(m.axes)) if dims is None else [d for d in dims if d < len(m.axes)])


def _copy(node: Node, call: Call) -> Step | None:
    return lambda m: m


def _are_ints(dims: Any) -> bool:
    return isinstance(dims, (list, tuple)) and all(isinstance(d, int) and d >= 0 for d in dims)


STEPS: dict[str, Callable[[Node, Call], Step | None]] = {
    "slice": _slice, "select": _select, "reshape": _reshape, "expand": _expand, "permute": _permute, "flip": _flip,
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "clone": _copy, "contiguous": _copy,
}  # fmt: skip


def only_used_by(nodes: Iterable[Node], *users: Node) -> list[Node]:
    """The nodes that are dead once the users are erased; together with a split, its unused pieces are listed too.

    A split is dead if each of its pieces is dead or has no users.
    """
    dead = dict.fromkeys(users)
    for node in sorted(set(nodes), reverse=True):
        unused = []
        for other in node.users:
            if other.target is getitem and not other.users:
                unused.append(other)
            elif other not in dead:
                break
        else:
            dead |= dict.fromkeys([*unused, node])
    return list(dead)[len(users) :]
