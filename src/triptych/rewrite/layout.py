"""Values that would lie otherwise in memory: how far the difference reaches, and whether anybody could see it."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from .. import _private
from ..ir.effects import node_operands
from ..ir.facts import difference, fact, sharing
from ..ir.program import Program
from ..ir.schema import packet_tags
from .refusal import Refused

FURTHEST = 256
"""So many values a replaced one are looked at before a difference counts as one that is seen."""

READS_STRIDES = frozenset("as_strided as_strided_copy as_strided_scatter view_as_real view_as_complex view".split())
"""Operations whose meaning, not only whose result's place in memory, depends on how the operand lies."""

SIZE_FROM_DATA = frozenset(["dynamic_output_shape", "data_dependent_output"])

KNOWN_NAMESPACES = ("aten", "prims", "triptych")
"""Operators of others may take for granted that an operand is contiguous."""


def follow(program: Program, replaced: Mapping[Node, Any]) -> dict[Node, Any]:
    """What is known of the values computed from `replaced`, once those lie as the given facts say.

    The difference ends where an operation makes the same of it, as a product, a sum or a copy does. Raises Refused
    if it gets to the caller, or to an operation that could tell.
    """
    aliasing = program.aliasing
    facts: dict[Node, Any] = dict(replaced)
    for node in replaced:
        if aliasing.written(node) or aliasing.is_input(node):
            raise Refused(_problem(node, replaced[node]))
    waiting = {u for n in replaced for u in n.users}
    work = list(waiting)
    heapq.heapify(work)
    while work:
        node = heapq.heappop(work)
        cause = next(n for n in node.all_input_nodes if n in facts)
        if node.op == "output" or len(facts) > FURTHEST * len(replaced) or not _is_blind(program, node):
            raise Refused(_problem(cause, facts[cause]))
        old = fact(node)
        try:
            new = program.compute(node, lambda n: facts.get(n, fact(n)))
        except Exception as error:
            raise Refused(_problem(cause, facts[cause])) from error
        if old is None or new is None or difference(old, new, strides=False):
            raise Refused(_problem(cause, facts[cause]))
        _require_same_sharing(program, node, old, new, facts)
        if difference(old, new) is None:
            continue
        facts[node] = new
        for user in node.users:
            if user not in waiting:
                waiting.add(user)
                heapq.heappush(work, user)
    return {n: f for n, f in facts.items() if n not in replaced}


def _problem(node: Node, new: Any) -> str:
    return difference(fact(node), new) or f"{node.name} would lie otherwise in memory"


def _is_blind(program: Program, node: Node) -> bool:
    """Does the operation compute the same values, however its operands lie?"""
    call = program.call(node)
    if call is None or call.op in READS_STRIDES or not program.aliasing.effects(node).pure:
        return False
    if packet_tags(call.op) & SIZE_FROM_DATA:  # computed again, it would make up sizes that nobody knows
        return False
    target = node.target
    return not isinstance(target, _private.OpOverload) or target.namespace in KNOWN_NAMESPACES


def _require_same_sharing(program: Program, node: Node, old: Any, new: Any, facts: Mapping[Node, Any]) -> None:
    """What was a view may be a copy now (`reshape`, `contiguous`) or the other way round: then only one of the
    values in that memory may be returned."""
    operands = list(node_operands((node.args, node.kwargs)))
    before = sharing(old, [fact(n) for n in operands])
    if before == sharing(new, [facts.get(n, fact(n)) for n in operands]):
        return
    aliasing = program.aliasing
    memories = {aliasing.memory(n): aliasing.output_uses(n) for n in (node, *operands) if n is node or n in facts}
    if sum(memories.values()) > 1 or any(aliasing.written(n) or aliasing.is_input(n) for n in memories):
        raise Refused(f"{node.name} would share other memory than before")
