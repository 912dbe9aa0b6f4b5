"""Helpers for the masks and numbers in the terms of an attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import fact, tensor_fact
from ..ir.program import Program, Value
from ..rewrite.emit import Emitter

MASKS = -9e3
"""Scores that are filled with a number as low as this are meant to be masked."""
MARGIN = 128.0
"""A score that is lower than another by this has no weight beside it: exp(-128) is 0 in float32."""


def negation(program: Program, mask: Node) -> tuple[Node, bool]:
    """A mask without the `~` before it, and whether there was an odd number of them."""
    negated = False
    while (call := program.call(mask)) is not None and call.op in ("bitwise_not", "logical_not") and not call.mutates:
        inner = call.args["self"]
        tensor = tensor_fact(inner)
        if tensor is None or tensor.dtype != torch.bool or any(map(program.aliasing.written, (mask, inner))):
            break
        mask, negated = inner, not negated
    return mask, negated


def where_one(op: Emitter, node: Node) -> Value:
    """Where a tensor of zeros and ones is one, as a boolean."""
    call = op.program.call(node)
    inner = call.args["self"] if call is not None and call.op == "to" and not call.mutates else None
    tensor = tensor_fact(inner)
    if isinstance(inner, Node) and tensor is not None and tensor.dtype == torch.bool:
        return Value(op.program, inner)
    return op.ne(node, 0)


def is_number(value: Any) -> bool:
    """Is it a single number for all elements, a Python number or a symbolic one?"""
    if isinstance(value, Node):
        value = fact(value)
        return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
