"""Concatenations inside of others along the same axis: their blocks are blocks of the outer one."""

from __future__ import annotations

import itertools
from abc import ABC
from typing import Any, ClassVar

from torch.fx import Node

from ..ir.program import Program
from ..rewrite.rule import Rule


def joined_operands(program: Program, node: Node, how: str, dim: Any) -> list[Node] | None:
    """What a cat (or a stack) along this dim joins; None for any other value."""
    call = program.call(node)
    if call is None or call.op != how or call.mutates or call.get("dim") != dim:
        return None
    tensors = call.args["tensors"]
    return list(tensors) if isinstance(tensors, (list, tuple)) and tensors else None


MOST_USERS = 32
"""Users looked at from one value: keeps the passes linear."""


class Nested(Rule, ABC):
    """cat([cat([a, b], d), c], d) -> cat([a, b, c], d)"""

    inner: ClassVar[str]

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim)

    def check(self, m, tensors, dim):
        m.applies(isinstance(tensors, (list, tuple)) and len(tensors) > 1, "one operand, or not listed")
        inner = [t for t in dict.fromkeys(tensors) if joined_operands(m.program, t.node, self.inner, dim)]
        m.applies(inner, f"no {self.inner} among the operands")
        own = [t for t in inner if _only_joined_further(m.program, t.node, dim)]
        m.require(own, f"{inner[0].node.name} is used elsewhere, and would be made all the same")
        same = [t for t in own if t.dtype is not None and t.dtype == m.root.dtype]
        m.require(same, f"{own[0].dtype} is converted to {m.root.dtype} on the way")
        m.cover(t.node for t in same)

    def rewrite(self, op, tensors, dim, m):
        flat: list[Any] = []
        merged = set(m.nodes)
        for t in tensors:
            operands = joined_operands(m.program, t.node, self.inner, dim) if t.node in merged else None
            if operands is None:
                flat.append(t)
            else:
                flat += operands if self.inner == "cat" else [op.unsqueeze(x, dim) for x in operands]
        return op.cat(flat, dim=dim)


def _only_joined_further(program: Program, node: Node, dim: Any) -> bool:
    """Every user is a cat along the same dim, so that nobody needs the value itself."""
    users = list(itertools.islice(node.users, MOST_USERS + 1))
    return len(users) <= MOST_USERS and all(joined_operands(program, u, "cat", dim) is not None for u in users)
