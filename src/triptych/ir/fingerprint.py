"""A graph's structure as a short string: equal for graphs that compute the same in the same way."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.fx import Graph, Node

from .facts import fact
from .text import target_name, type_of


def fingerprint(graph: Graph) -> str:
    """Names of nodes and source lines do not count; operations, arguments, order and types do."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        value = fact(node)
        name = "" if node.op == "placeholder" else target_name(node)
        kind = "" if value is None else type_of(value)
        text = f"{node.op} {name} {_argument(node.args, number)} {_argument(node.kwargs, number)} {kind}\n"
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _argument(value: Any, number: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{number[value]}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_argument(v, number) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_argument(v, number)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, slice):
        return "slice" + _argument((value.start, value.stop, value.step), number)
    return repr(value)
