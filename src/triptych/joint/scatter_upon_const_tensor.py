"""`scatter_upon_const_tensor`: replaces a scatter into a constant tensor by a comparison with the index."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..cost import Moved, Work, bytes_of, read_and_written
from ..ir.facts import is_static, known, known_equal, number, tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..ir.sizes import elements
from ..ir.traits import is_pointwise
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.iota import iota
from ..rewrite.rule import Match, Rule

FIRST_USERS = 64
"""Search budget: how many users of a value are examined for a proof."""

DEEPEST = 8
"""Search budget: how many operations back to compare how two indices are computed."""


@dataclass(frozen=True)
class ScatterUponConstTensor(Rule):
    """scatter(full(shape, fill), dim, index, value) -> where(index == iota, value, fill), index of size 1 along dim

    With such an index, no element is written twice. Each element is then computed where it is used, instead of filling
    a buffer, writing to it and reading it again. An index out of range must still raise. If a `gather` uses the same
    index over the same size, as in the forward of a cross-entropy, it raises; otherwise the rule takes the index
    through a `gather` from the iota, which raises in the same way.

    Generated code never loses: one kernel writes the same bytes as the two before. Without it, every operation is a
    kernel, so that the new form pays only for large results. With symbolic sizes it is used in any case, because a
    scatter guards that it has something to write: a program would be compiled again where it has not.
    """

    always: bool = False
    """Rewrite without asking the cost model: for tests of the rewrite itself."""

    interior_may_be_used = True
    mixed_dtypes = True

    def pattern(self, op, size, fill, dtype, layout, device, pinned, dim, index: Tensor, value, source: Tensor):
        constant = op.full(size, fill, dtype=dtype, layout=layout, device=device, pin_memory=pinned)
        return op.any_of(
            op.scatter(constant, dim, index, value=value),
            op.scatter(constant, dim, index, src=source),
            op.scatter_add(constant, dim, index, source),
        )

    def check(self, m, fill, pinned, dim, index, value, source):
        m.applies(m.root.known and index.known and index.rank == m.root.rank > 0)
        m.require(not pinned, "its result is in pinned memory")
        m.require(isinstance(fill, (bool, int, float)), "the fill is not a known number")
        several = "the index is not known to have size 1 along the dim"
        m.require(known(index.shape[dim] == 1), several, at=index, wanted=f"size 1 in dim {dim}", found=index.shape)
        others = [d for d in range(m.root.rank) if d != dim]
        is_whole = all(known_equal(index.shape[d], m.root.shape[d]) for d in others)
        m.require(
            is_whole, "the index covers only a part of the result", at=index, wanted=m.root.shape, found=index.shape
        )
        if source is not None:
            larger = "the source is larger than the index"
            m.require(known_equal(source.shape, index.shape), larger, at=source, wanted=index.shape, found=source.shape)
            converted = "{found} would be written into {wanted}"
            m.require(source.dtype == m.root.dtype, converted, at=source, wanted=m.root.dtype, found=source.dtype)
        else:
            m.require(isinstance(value, (bool, int, float)), "the value is not a known number", found=value)
            m.require(
                _fits(value, m.root.dtype), "{found} is not a value of {wanted}", wanted=m.root.dtype, found=value
            )
        generated = m.program.options.codegen == "inductor"
        if not self.always and (generated or is_static(m.root.shape)):
            m.pays(*_forms(m, dim, index, source))

    def rewrite(self, op, m, fill, dim, index, value, source):
        like, shape = m.root.tensor, list(m.root.shape)
        places = iota(op, shape[dim], like.device)
        places = op.reshape(places, [shape[dim] if d == dim else 1 for d in range(len(shape))])
        if not _checked_elsewhere(m, index, dim, shape[dim]):
            # some kernels of gather count a negative index from the end; in a scatter it is out of range
            beyond = op.full([], shape[dim], dtype=index.dtype, device=like.device)
            index = op.gather(op.expand(places, shape), dim, op.where(op.lt(index, 0), beyond, index))
        background = op.full([], fill, dtype=like.dtype, device=like.device)
        if source is None:
            source = op.full([], value, dtype=like.dtype, device=like.device)
        elif m.root.op == "scatter_add":
            source = op.add(source, background)  # like scatter_add, it turns -0.0 into 0.0
        return op.where(op.eq(index, places), source, background)

    examples = [
        fires(lambda i: torch.zeros(4, 10).scatter(1, i, 1.0), "i64[4, 1]"),
        fires(lambda i: torch.zeros(4, 10).scatter(-1, i.unsqueeze(-1), 1), "i64[4]"),
        fires(lambda i: torch.full((10, 4), 3, dtype=torch.int32).scatter(0, i, -7), "i64[1, 4]"),
        fires(lambda i: torch.zeros(4, 10, dtype=torch.bool).scatter(1, i, True), "i64[4, 1]"),
        fires(lambda i, x: torch.zeros(4, 10).scatter(1, i, x), "i64[4, 1]", "f32[4, 1]"),
        fires(lambda i, x: torch.zeros(4, 10).scatter_add(1, i, x), "i64[4, 1]", torch.tensor([[-0.0], [1], [2], [3]])),
        fires(lambda i, x: torch.ones(4, 10).scatter_add(1, i, x), "i64[4, 1]", "f32[4, 1]"),
        fires(lambda x, i: (x.gather(1, i), torch.zeros(4, 10).scatter(1, i, 2.0)), "f32[4, 10]", "i64[4, 1]"),
        fires(lambda x, i: torch.zeros(x.shape[0], 10).scatter(1, i, 1.0), "f32[4, 10]", "i64[4, 1]", dynamic=True),
        fires(lambda i: torch.full((4, 10), float("nan")).scatter(1, i, float("inf")), "i64[4, 1]"),
        fires(lambda i: torch.zeros(0, 10).scatter(1, i, 1.0), "i64[0, 1]"),
        declines(lambda i: torch.zeros(4, 10).scatter(1, i, 1.0), "i64[4, 2]", because="size 1 along the dim"),
        declines(lambda i: torch.zeros(4, 10).scatter(1, i, 1.0), "i64[3, 1]", because="covers only a part"),
        declines(lambda i, x: torch.zeros(4, 10).scatter(1, i, x), "i64[4, 1]", "f32[4, 2]", because="larger"),
        declines(lambda i: torch.ones(4, 10).scatter(1, i, 2.0, reduce="multiply"), "i64[4, 1]"),
        declines(lambda x, i: x.scatter(1, i, 2.0), "f32[4, 10]", "i64[4, 1]"),
        declines(lambda i: torch.zeros(4, 10, dtype=torch.uint8).scatter(1, i, 2.5), "i64[4, 1]", because="not a"),
        declines(lambda i: torch.zeros(10).scatter(0, i, 1.0), "i64[]"),
        fires(lambda i: torch.zeros(64, 16384).scatter(1, i, 1.0), "i64[64, 1]", options={"codegen": "eager"}),
        declines(lambda i: torch.zeros(4, 10).scatter(1, i, 1.0), "i64[4, 1]", options={"codegen": "eager"},
                 because="would cost"),
        fires(lambda i: torch.zeros(i.shape[0], 10).scatter(1, i, 1.0), "i64[4, 1]", options={"codegen": "eager"},
              dynamic=True),
        declines(lambda x: F.one_hot(x, 5), "i64[4]"),
    ]  # fmt: skip


def _forms(m: Match, dim: int, index: Value, source: Value | None) -> tuple[Work, Work]:
    """Filling and scattering, and comparing."""
    like, places = tensor_of(m.root.node), tensor_of(index.node)
    given = [places] if source is None else [places, tensor_of(source.node)]
    filling, comparing = read_and_written(like), read_and_written(*given, like)
    scattering = Moved(read_and_written(*given).bytes + elements(places.shape) * like.dtype.itemsize)
    old = Work.of(like.device, filling, scattering)
    if m.program.options.codegen == "inductor":
        return old, Work.of(like.device, comparing)
    # small kernels: the iota, the fill and the value, or its sum with the fill; four more for a gather of the index
    small = 2 if source is not None and m.root.op == "scatter" else 3
    small += 0 if _checked_elsewhere(m, index, dim, like.shape[dim]) else 4
    flags = elements(like.shape)
    apart = Moved(bytes_of(places) + flags), Moved(comparing.bytes - bytes_of(places) + flags)
    # without generated code, a scatter copies the tensor that it writes to
    return old + read_and_written(like, times=2), Work.of(like.device, Moved(0, launches=small), apart)


def _fits(value: bool | int | float, dtype: torch.dtype) -> bool:
    """Does writing the number into that dtype only round it, as `full` would?"""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    info = torch.iinfo(dtype)
    return float(value).is_integer() and info.min <= value <= info.max


# ---- an index that another operation checks ----


def _checked_elsewhere(m: Match, index: Value, dim: int, length: Any) -> bool:
    """Does a `gather` that stays in the graph take the same index over the same size?"""
    for source in _sources(m.program, index.node):
        for gather in _gathers(m.program, source):
            call = m.program.call(gather)
            assert call is not None
            over = tensor_fact(call.args["self"])
            if over is None or not gather < m.root.node or not gather.users:
                continue
            same_size = known_equal(over.shape[call.args["dim"]], length)
            if same_size and same_elements(m.program, call.args["index"], index.node):
                return True
    return False


def _sources(program: Program, node: Node) -> list[Node]:
    """The value, and the values that it is computed from, a few steps back."""
    seen = [node]
    edge = [node]
    for _ in range(DEEPEST):
        edge = [n for e in edge for n in e.all_input_nodes if n not in seen and tensor_fact(n) is not None]
        seen.extend(dict.fromkeys(edge))
    return seen


def _gathers(program: Program, node: Node) -> list[Node]:
    """Gathers whose index is computed from the value, in a few steps."""
    gathers, edge = [], [node]
    for _ in range(DEEPEST // 2):
        users = dict.fromkeys(u for e in edge for u in itertools.islice(e.users, FIRST_USERS))
        calls = {u: call for u in users if (call := program.call(u)) is not None and not call.mutates}
        gathers += [u for u, call in calls.items() if call.op == "gather" and call.args["index"] in edge]
        edge = [u for u, call in calls.items() if is_pointwise(call.op) or call.op in SAME_ORDER]
    return gathers


SAME_ORDER = ("reshape", "squeeze", "unsqueeze")
"""Views that leave the elements in their order."""


def same_elements(program: Program, left: Any, right: Any, depth: int = DEEPEST) -> bool:
    """Do two values hold the same elements in the same order, whatever their shapes?"""
    left, right = _without_views(program, left), _without_views(program, right)
    if left is right:
        return True
    if not isinstance(left, Node) or not isinstance(right, Node):
        return type(left) is type(right) and left == right
    one, other = program.call(left), program.call(right)
    if depth == 0 or one is None or other is None or one.op != other.op or one.args.keys() != other.args.keys():
        return False
    if one.mutates or other.mutates or not all(program.aliasing.effects(n).pure for n in (left, right)):
        return False
    if one.op in ("scalar_tensor", "full"):
        return one.args == other.args
    if not is_pointwise(one.op) or not (_is_plain(program, left) and _is_plain(program, right)):
        return False
    return all(same_elements(program, one.args[key], other.args[key], depth - 1) for key in one.args)


def _is_plain(program: Program, node: Node) -> bool:
    """Does every operand have as many elements as the result, or no dims? Then nothing is broadcast along some dims
    only."""
    result = tensor_fact(node)
    operands = [t for n in node.all_input_nodes if (t := tensor_fact(n)) is not None]
    return result is not None and all(t.dim() == 0 or known(t.numel() == result.numel()) for t in operands)


def _without_views(program: Program, value: Any) -> Any:
    value = number(value) if isinstance(value, Node) and tensor_fact(value) is None else value
    while isinstance(value, Node):
        call = program.call(value)
        if call is None or call.mutates or call.op not in SAME_ORDER or program.aliasing.written(value):
            return value
        value = call.args["self"]
    return value
