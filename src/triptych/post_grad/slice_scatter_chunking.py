"""`slice_scatter_chunking`: concatenates the slices of a tensor that is filled slice by slice.

`y = x.new_empty(...); y[:2] = a; y[2:] = b` becomes a chain in which every write copies the whole tensor. Where the
writes cover all of it, or the rest is known to hold one number, nothing of the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import bytes_of, device_model
from ..ir.facts import known_equal, tensor_fact
from ..ir.program import Program
from ..ir.values.knowledge import knowledge
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

ATEN: dict[str, Any] = {"dialects": ("aten",)}


def _filled(y: Any, *writes: tuple[Any, ...]) -> Any:
    """Each write is `(source, dim, row)` or `(source, dim, start, end)`, the latter optionally with a step."""
    for source, dim, *place in writes:
        scatter = torch.select_scatter if len(place) == 1 else torch.slice_scatter
        y = scatter(y, source, dim, *place)
    return y


@dataclass(frozen=True)
class Write:
    """`self[..., start:end, ...] = source` along a dim."""

    node: Node
    before: Any
    source: Node
    dim: int
    start: int
    end: int
    is_row: bool
    """The write is a `select_scatter`: it writes one row, and the source lacks the dim."""
    nodes: tuple[Node, ...]
    """The write, and the nodes that serve this write alone: a `copy(part of y, source)`, which reads only the shape of
    the part, and the slice that takes the part."""

    @staticmethod
    def read(program: Program, node: Node) -> Write | None:
        call, whole = program.call(node), tensor_fact(node)
        if call is None or whole is None or call.op not in ("slice_scatter", "select_scatter"):
            return None
        args = call.args
        source, nodes = _without_copy(program, args.get("src"), node)
        written, dim = tensor_fact(source), args.get("dim", 0)
        if written is None or written.dtype != whole.dtype or not isinstance(dim, int) or whole.dim() == 0:
            return None
        dim %= whole.dim()
        size, is_row = whole.shape[dim], call.op == "select_scatter"
        start = args.get("index") if is_row else args.get("start") or 0
        if not isinstance(size, int) or not isinstance(start, int):
            return None
        start = start + size if start < 0 else min(start, size)
        end = start + 1 if is_row else args.get("end")
        end = size if end is None else end
        if not isinstance(end, int) or args.get("step", 1) != 1:
            return None
        end = max(start, min(end + size if end < 0 else end, size))
        part = [s for d, s in enumerate(whole.shape) if d != dim or not is_row]
        if not is_row:
            part[dim] = end - start
        if not known_equal(written.shape, part):
            return None
        return Write(node, args["self"], source, dim, start, end, is_row, nodes)


def _without_copy(program: Program, source: Any, write: Node) -> tuple[Any, tuple[Node, ...]]:
    """The source, looking through a `copy(part, source)`, and the nodes that serve this write alone."""
    call = program.call(source) if isinstance(source, Node) and len(source.users) == 1 else None
    if call is None or call.op != "copy" or call.mutates:
        return source, (write,)
    part, inner, copied = call.args["self"], call.args["src"], tensor_fact(source)
    fact = tensor_fact(inner)
    if fact is None or copied is None or fact.dtype != copied.dtype or not known_equal(fact.shape, copied.shape):
        return source, (write,)
    view = program.call(part) if isinstance(part, Node) and len(part.users) == 1 else None
    is_part = view is not None and view.op in ("slice", "select")
    return inner, (write, source, part) if is_part else (write, source)


class FilledSliceBySlice(Rule):
    """slice_scatter(slice_scatter(y, a, d, 0, n), b, d, n, m) -> cat([a, b], d), where all of y is written

    Where writes overlap, the last one counts. The rule declines if a part of y is not written, unless y is known to be
    filled with one number. `select_scatter` writes a slice of one row.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of("slice_scatter", "select_scatter"):
            last = None if node._erased else Write.read(program, node)
            if last is None or any(_continues(program, last, user) for user in node.users):
                continue
            writes = _chain(program, last)
            if len(writes) > 1:
                yield Match.at(program, node, covers=[n for w in writes for n in w.nodes], writes=writes)

    def check(self, m, writes):
        first, size = writes[-1], m.root.shape[writes[0].dim]
        parts = _parts(writes, size)
        m.bindings["parts"] = parts
        untouched = [part for part in parts if part[2] is None]
        number = knowledge(m.program).number(first.before) if untouched else None
        m.require(not untouched or number is not None, "a part of {at} is not written", at=first.before)
        m.bindings["number"] = number
        model, moved = device_model(m.root.device), 2 * bytes_of(m.root.tensor)
        m.pays(len(writes) * model.copy(moved), model.copy(moved), sure=True)

    def rewrite(self, op, m):
        dim, root = m.bindings["writes"][0].dim, m.root
        values = []
        for start, end, write in m.bindings["parts"]:
            if write is None:
                shape = [*root.shape[:dim], end - start, *root.shape[dim + 1 :]]
                values.append(op.full(shape, m.bindings["number"], dtype=root.dtype, device=root.device))
                continue
            source = op.unsqueeze(write.source, dim) if write.is_row else write.source
            if (start, end) != (write.start, write.end):
                source = op.slice(source, dim, start - write.start, end - write.start)
            values.append(source)
        return op.cat(values, dim=dim) if len(values) > 1 else op.clone(values[0])

    examples = [
        fires(lambda a, b: _filled(a.new_empty(5, 3), (a, 0, 0, 2), (b, 0, 2, 5)), "f32[2, 3]", "f32[3, 3]", **ATEN),
        fires(lambda a, b: _filled(torch.zeros(4, 3), (a, 0, 0), (b, 0, 1), (a, 0, -1)), "f32[3]", "f32[3]", **ATEN),
        fires(lambda a, b: _filled(a.new_zeros(2, 6), (a, -1, 0, 4), (b, 1, 3, 9)), "f64[2, 4]", "f64[2, 3]", **ATEN),
        fires(lambda a, b: _filled(torch.ones(5), (a, 0, 1, 3), (b, 0, 1, 3)), "f32[2]", "f32[2]", **ATEN),
        fires(
            lambda a: _filled(a.new_empty(a.shape[0], 4), (a[:, :1], 1, 0, 1), (a[:, :3], 1, 1, 4)), "i64[3, 5]",
            dynamic=True, **ATEN,
        ),
        declines(
            lambda x, a, b: _filled(x, (a, 0, 0, 2), (b, 0, 3, 5)), "f32[5, 3]", "f32[2, 3]", "f32[2, 3]",
            because="is not written", **ATEN,
        ),
        declines(lambda a: _filled(a.new_zeros(5, 3), (a, 0, 0, 2)), "f32[2, 3]", **ATEN),
        declines(
            lambda a, b: (y := _filled(a.new_zeros(4, 3), (a, 0, 0, 2)), y.sum(), _filled(y, (b, 0, 2, 4))),
            "f32[2, 3]", "f32[2, 3]", **ATEN,
        ),
        declines(
            lambda a, b: _filled(a.new_zeros(4, 3), (a, 0, 0, 4, 2), (b, 0, 1, 4, 2)), "f32[2, 3]", "f32[2, 3]", **ATEN
        ),
        declines(lambda a, b: _filled(a.new_zeros(2, 3), (a, 0, 0), (b, 1, 1)), "f32[3]", "f32[2]", **ATEN),
        declines(
            lambda a, b: _filled(a.new_zeros(3, 4).t(), (a, 0, 0, 2), (b, 0, 2, 4)), "f32[2, 3]", "f32[2, 3]",
            because="stride", **ATEN,
        ),
    ]  # fmt: skip


def _continues(program: Program, write: Write, user: Node) -> bool:
    """Does `user` write along the same dim into the result of `write`, which nothing else reads?"""
    following = Write.read(program, user)
    return (
        following is not None
        and following.before is write.node
        and following.source is not write.node
        and following.dim == write.dim
        and set(write.node.users) <= set(following.nodes)
    )


def _chain(program: Program, last: Write) -> list[Write]:
    """The writes that end in this one, the last first."""
    writes = [last]
    while isinstance(writes[-1].before, Node):
        earlier = Write.read(program, writes[-1].before)
        if earlier is None or not _continues(program, earlier, writes[-1].node):
            break
        writes.append(earlier)
    return writes


def _parts(writes: Sequence[Write], size: int) -> list[tuple[int, int, Write | None]]:
    """The dim divided into ranges (start, end), each with the last write to it; None where nothing is written."""
    bounds = sorted({0, size, *(w.start for w in writes), *(w.end for w in writes)})
    place = {bound: i for i, bound in enumerate(bounds)}
    last: list[Write | None] = [None] * (len(bounds) - 1)
    for write in reversed(writes):
        for i in range(place[write.start], place[write.end]):
            last[i] = write
    parts: list[tuple[int, int, Write | None]] = []
    for start, end, owner in zip(bounds, bounds[1:], last):
        if parts and parts[-1][2] is owner:
            start = parts.pop()[0]
        parts.append((start, end, owner))
    return parts


@dataclass(frozen=True)
class SliceScatterChunking(Pass):
    """Computes a tensor that is filled slice by slice with one cat, instead of a chain of writes that each copy the
    whole tensor."""

    name = "slice_scatter_chunking"

    def rules(self) -> Sequence[Rule]:
        return (FilledSliceBySlice(),)
