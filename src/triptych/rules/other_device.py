"""Rebuilding CPU values on another device, for rules that move constructors and positions there."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..rewrite.emit import Emitter


def again_elsewhere(op: Emitter, node: Node, twins: dict[Node, Node], extra: dict[str, Any]) -> Node:
    """The same call on the counterparts (`twins`) of its operands on the other device."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: twins.get(n, n))
    return op.node(node.op, node.target, args, {**kwargs, **extra}).node


def end_elsewhere(end: Node, twins: dict[Node, Node], op: Emitter) -> Any:
    """The replacement of a node that copied its operand to the other device, now that the operand is already there."""
    call = op.program.call(end)
    if call is None or call.op != "to":
        return again_elsewhere(op, end, twins, {})
    twin = op.program.value(twins[call.args["self"]])
    rest = {
        k: v for k, v in call.args.items() if k not in ("self", "device", "non_blocking", "copy", "layout")
    }
    if rest.get("dtype") == twin.dtype:
        del rest["dtype"]
    return op.to(twin, **rest) if rest else twin
