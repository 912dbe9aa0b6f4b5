"""Nested concatenations along one axis, flattened."""

from __future__ import annotations

import itertools
from abc import ABC
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch.fx import Node

from ..ir.program import Program
from ..rewrite.rule import Match, Rule


def joined_operands(program: Program, node: Node, how: str, dim: Any) -> Sequence[Node] | None:
    """The operands of a cat (or stack) along this dim; None for any other value."""
    call = program.call(node)
    if call is None or call.op != how or call.mutates or call.get("dim") != dim:
        return None
    tensors = call.args["tensors"]
    return tensors if isinstance(tensors, (list, tuple)) and tensors else None


MOST_USERS = 32
"""Search budget: users examined per value. Keeps the passes linear."""
FEW = 64
"""Nested concatenations of up to this many operands are flattened step by step, from the inside; larger ones only all
at once, from the outermost concatenation."""
MOST_OPERANDS = 100_000


class Nested(Rule, ABC):
    """cat([cat([a, b], d), c], d) -> cat([a, b, c], d)"""

    inner: ClassVar[str]

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim)

    def check(self, m, tensors, dim):
        m.applies(isinstance(tensors, (list, tuple)) and len(tensors) > 1, "fewer than two operands")
        inner = [t for t in dict.fromkeys(tensors) if joined_operands(m.program, t.node, self.inner, dim)]
        m.applies(inner, f"no {self.inner} among the operands")
        candidates = [t for t in inner if _only_joined_further(m.program, t.node, dim)]
        m.require(candidates, "{at} is used elsewhere, so it would be computed anyway", at=inner[0])
        same = [t for t in candidates if t.dtype is not None and t.dtype == m.root.dtype]
        converted = "{found} is converted to {wanted} by the outer concatenation"
        m.require(same, converted, at=candidates[0], wanted=m.root.dtype, found=candidates[0].dtype)
        is_operand = _only_joined_further(m.program, m.root.node, dim)
        operands, removed, is_all = self._flat(m, tensors, dim, FEW if is_operand else MOST_OPERANDS)
        few = is_all and len(operands) <= FEW
        m.applies(few or not is_operand, "it is merged into a larger concatenation as a whole")
        m.require(
            is_all, "merged, it would have more than {wanted} operands", wanted=MOST_OPERANDS, found=len(operands)
        )
        m.require(few or len(operands) <= 4 * len(set(operands)), "merged, it would mostly repeat the same operands")
        m.cover(removed)

    def rewrite(self, op, tensors, dim, m):
        operands, _, _ = self._flat(m, tensors, dim, MOST_OPERANDS)
        return op.cat([op.unsqueeze(node, dim) if stacked else node for node, stacked in operands], dim=dim)

    def _flat(
        self, m: Match, tensors: Any, dim: Any, most: int
    ) -> tuple[list[tuple[Node, bool]], dict[Node, None], bool]:
        """The flat operands, each with whether it was stacked; the inner concatenations that disappear; and whether the
        walk is complete. It stops early where there are more than `most` of either."""
        operands: list[tuple[Node, bool]] = []
        removed: dict[Node, None] = {}
        work: list[Iterator[Node]] = [iter([t.node for t in tensors])]
        while work and max(len(operands), len(removed)) <= most:
            node = next(work[-1], None)
            if node is None:
                work.pop()
                continue
            inner_operands = joined_operands(m.program, node, self.inner, dim)
            value = m.program.value(node)
            if inner_operands is None or value.dtype != m.root.dtype or not _only_joined_further(m.program, node, dim):
                operands.append((node, False))
                continue
            removed[node] = None
            if self.inner == "cat":
                work.append(iter(inner_operands))
            else:
                operands += [(x, True) for x in inner_operands]
        return operands, removed, not work


def _only_joined_further(program: Program, node: Node, dim: Any) -> bool:
    """Every user is a cat along the same dim, so nothing needs the value itself."""
    users = list(itertools.islice(node.users, MOST_USERS + 1))
    return 0 < len(users) <= MOST_USERS and all(joined_operands(program, u, "cat", dim) is not None for u in users)
