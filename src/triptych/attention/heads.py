"""Keys and values that are repeated for several heads (grouped heads), and which kernels take them unrepeated."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from .layout import groups

WIDEST = 256
"""The widest head that the kernels for grouped heads take."""


def without_kernel(query: torch.Tensor, value: Repeated, mask: Any) -> str | None:
    """Why no kernel benefits from grouped heads; None if one does."""
    if query.device.type != "cuda":
        return "heads in groups save nothing here"
    if mask is not None:
        return "no kernel takes a mask and heads in groups"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"no kernel takes heads of {query.dtype} in groups"
    if not known(query.shape[-1] <= WIDEST) or not known_equal(query.shape[-1], value.shape[-1]):
        return "no kernel takes such wide heads in groups"
    return None


class Repeated:
    """Keys or values (batch, groups, rows, width) whose groups are each repeated for several heads."""

    def __init__(self, source: Node, shape: list[Any], nodes: list[Node]) -> None:
        self.source, self.shape, self.nodes = source, shape, nodes

    def made(self, op: Emitter) -> Value:
        value = Value(op.program, self.source)
        return value if known_equal(self.shape, value.shape) else op.reshape(value, self.shape)


def unrepeated(program: Program, node: Any) -> Repeated | None:
    """The keys or values that a node repeats for several heads, as `repeat_interleave` along the heads does."""
    known_value, call = tensor_fact(node), program.call(node) if isinstance(node, Node) else None
    if known_value is None or known_value.dim() != 4 or call is None or call.mutates:
        return None
    if call.op == "repeat_interleave":
        source = tensor_fact(call.args["self"])
        if source is None or call.get("dim") != 1 or not isinstance(call.args["repeats"], int):
            return None
        return Repeated(call.args["self"], list(source.shape), [node])
    if call.op == "expand":
        return _expanded(program, node, [0, 1, 2, 3], [node])
    if call.op != "reshape" or not isinstance(call.args["self"], Node):
        return None
    inner = call.args["self"]
    stretched, again = tensor_fact(inner), program.call(inner)
    if stretched is None or again is None or again.op != "expand" or again.mutates:
        return None
    try:
        parts = groups(list(stretched.shape), list(known_value.shape))
    except Refused:
        return None
    place = {d: (after, before) for before, after in parts for d in before}
    return _expanded(program, inner, [_head(place[d], d) for d in range(stretched.dim())], [node, inner])


def _head(place: tuple[list[int], list[int]], dim: int) -> int | None:
    """The dim of the result that an axis becomes, or of which it becomes the innermost part."""
    after, before = place
    return after[0] if len(after) == 1 and before[-1] == dim else None


def _expanded(program: Program, node: Node, places: list[int | None], nodes: list[Node]) -> Repeated | None:
    call, whole = program.call(node), tensor_fact(node)
    assert call is not None and whole is not None
    source = tensor_fact(call.args["self"])
    last = tensor_fact(nodes[0])
    if source is None or last is None or source.dim() != whole.dim():
        return None
    stretched = [d for d in range(whole.dim()) if not known_equal(source.shape[d], whole.shape[d])]
    if len(stretched) != 1 or places[stretched[0]] != 1 or not known(source.shape[stretched[0]] == 1):
        return None
    times = whole.shape[stretched[0]]
    heads = last.shape[1]
    if isinstance(heads, int) and isinstance(times, int) and heads % times == 0:
        return Repeated(call.args["self"], [last.shape[0], heads // times, *last.shape[2:]], nodes)
    return None
