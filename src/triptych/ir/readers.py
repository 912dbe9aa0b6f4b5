"""Which nodes read a value."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from .program import Program
from .traits import is_view


def readers(program: Program, node: Node) -> Iterator[Node]:
    """The nodes that read a value, itself or through views of it."""
    work, seen = [node], {node}
    while work:
        for user in work.pop().users:
            if user in seen:
                continue
            seen.add(user)
            call = program.call(user)
            if call is not None and is_view(call.op) and not call.mutates:
                work.append(user)
            else:
                yield user
