"""Attention sinks: a further column of scores that takes its share of the softmax and has no value.

`softmax(cat([scores, sink]))[..., :-1] @ v` is attention with one more key. That key and its value are zero, and its
bias is the sink. Keys and values are copied for it, and a mask is expanded over all heads; that costs less than writing
the scores to memory, down to a single query (measured on an H200: 1.4 times as fast with one query, 2.5 to 7 times with
many). Only the kernels' gradient of a bias is slow: with heads wider than 64 a sink that needs a gradient is left alone
(a training step took 1.1 times as long).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import known, known_equal, tensor_fact
from ..ir.program import Program, Value
from ..ir.values import knowledge
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused

WIDE = 64
ALIGNED = 8
"""GPU attention kernels need the bias's last dimension padded to a multiple of this."""


@dataclass(frozen=True)
class Joined:
    """Scores that are concatenated with a sink."""

    scores: Node
    sink: Node
    dim: int
    first: bool
    """The sink comes before the scores."""


def joined_with_sink(program: Program, call: Call) -> Joined | None:
    """cat([scores, sink], -1), where the sink is one column"""
    tensors = call.args.get("tensors")
    if call.op != "cat" or not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
        return None
    facts = [tensor_fact(t) for t in tensors]
    if any(f is None or f.dim() == 0 or f.dim() != facts[0].dim() for f in facts):  # type: ignore[union-attr]
        return None
    dim = call.get("dim") % facts[0].dim()  # type: ignore[union-attr]
    for at in (1, 0):
        column = facts[at]
        if column is not None and known(column.shape[dim] == 1):
            return Joined(tensors[1 - at], tensors[at], dim, at == 0)
    return None


def sink_column(op: Emitter, program: Program, joined: Joined, dtype: torch.dtype) -> Value:
    """The sink, not expanded along axes on which it is constant."""
    node = joined.sink
    number = knowledge(program).number(node)
    value = Value(program, node)
    if number is not None:
        return op.full([1] * value.rank, float(number), dtype=dtype, device=value.device)
    while (call := program.call(node)) is not None and call.op == "expand" and not call.mutates:
        inner = call.args["self"]
        source = tensor_fact(inner)
        if source is None or source.dim() != value.rank:
            break
        node = inner
    value = Value(program, node)
    return value if value.dtype == dtype else op.to(value, dtype=dtype)


def drops_sink(call: Call, old: torch.Tensor, new: torch.Tensor, dim: int, first: bool) -> bool:
    """Does the slice keep all probabilities but the sink's?"""
    if call.args.get("dim", 0) != dim or call.get("step") != 1 or not known_equal(old.shape[dim] - 1, new.shape[dim]):
        return False
    start = call.get("start")
    return type(start) is int and start == 1 if first else start is None or type(start) is int and start == 0


def require_quick_gradient(device: torch.device | None, width: int, wants_gradient: bool) -> None:
    if device is not None and device.type == "cuda" and wants_gradient and width > WIDE:
        raise Refused(f"the gradient of a sink costs more than is saved with heads {width} wide")


def further_keys(keys: Value) -> int:
    """How many keys are added: one for the sink, and on a GPU as many more as the kernels' alignment needs."""
    if keys.device is not None and keys.device.type == "cpu":
        return 1
    size = keys.shape[-2]
    return ALIGNED - size % ALIGNED if isinstance(size, int) else ALIGNED


def with_zero_rows(op: Emitter, value: Value, rows: int) -> Value:
    return op.constant_pad_nd(value, [0, 0, 0, rows])


def beside(op: Emitter, bias: Value | None, sink: Value, keys: Any, further: int) -> Value:
    """The bias of all keys and of the added ones: the sink for the first, and -inf for the rest."""
    lead = list(sink.shape[:-1])
    if bias is not None:
        lead = [b if known(a == 1) else a for a, b in zip(lead, bias.shape[:-1])]
    own = op.full([*lead, keys], 0.0, dtype=sink.dtype, device=sink.device) if bias is None else bias
    parts = [_stretched(op, own, [*lead, keys]), _stretched(op, sink, [*lead, 1])]
    if further > 1:
        parts.append(op.full([*lead, further - 1], -math.inf, dtype=sink.dtype, device=sink.device))
    return op.cat(parts, dim=-1)


def _stretched(op: Emitter, value: Value, shape: list[Any]) -> Value:
    return value if known_equal(value.shape, shape) else op.expand(value, shape)


def refuse_beside_sink(sink: Value | None) -> None:
    if sink is not None:
        raise Refused("scores are changed together with a sink beside them")
