"""Building on another device what stands on the CPU: for rules that move constructors and positions."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..rewrite.emit import Emitter


def again_elsewhere(op: Emitter, node: Node, twins: dict[Node, Node], extra: dict[str, Any]) -> Node:
    """The same call on the values of the other device."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: twins.get(n, n))
    return op.node(node.op, node.target, args, {**kwargs, **extra}).node


def end_elsewhere(end: Node, twins: dict[Node, Node], op: Emitter) -> Any:
    """What took its operand to the other device, where the operand is there already."""
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
