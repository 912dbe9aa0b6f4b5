"""Replacements with different strides: which downstream values change strides, and whether that could be visible."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.calls import of_a_library
from ..ir.effects import node_operands
from ..ir.facts import difference, fact, known_equal, same_strides, sharing
from ..ir.operations import with_trait
from ..ir.partitioned import is_gradient_that_fits
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.schema import packet_tags
from .refusal import Refused

FURTHEST = 256
"""Search budget: how many downstream values to examine per replaced node before assuming that a stride change is
visible."""

READS_LAYOUT = with_trait("reads_layout")

SIZE_FROM_DATA = frozenset(["dynamic_output_shape", "data_dependent_output"])

KNOWN_NAMESPACES = ("aten", "prims", "triptych")
"""Operators of other namespaces may assume that an operand is contiguous."""


def follow(program: Program, replaced: Mapping[Node, Any]) -> dict[Node, Any]:
    """The new facts of downstream values whose strides change because the nodes in `replaced` get the given facts.

    The change ends at an operation whose result has the same strides as before, as that of a product, a sum or a copy.
    Raises Refused if it reaches the caller, or an operation that may depend on strides. Strides of size-1 dims count
    too: pointwise operations order the dims of their result by them.
    """
    aliasing = program.aliasing
    facts: dict[Node, Any] = dict(replaced)
    for node, new in replaced.items():
        if difference(fact(node), new) and (aliasing.written(node) or aliasing.is_input(node)):
            raise Refused(_problem(node, new).blaming(node))
        _require_not_returned(node, new)
    waiting = {u for n in replaced for u in n.users if u.op != "output"}
    work = list(waiting)
    heapq.heapify(work)
    while work:
        node = heapq.heappop(work)
        cause = next(n for n in node.all_input_nodes if n in facts)
        if len(facts) > FURTHEST * len(replaced) or not _is_blind(program, node):
            raise Refused(_seen_by(node, cause, facts[cause]))
        old = fact(node)
        try:
            new = program.compute(node, lambda n: facts.get(n, fact(n)))
        except Exception as error:
            raise Refused(_seen_by(node, cause, facts[cause])) from error
        if old is None or new is None or difference(old, new, strides=False):
            raise Refused(_seen_by(node, cause, facts[cause]))
        _require_same_sharing(program, node, old, new, facts)
        if same_strides(old, new) or _is_computed_so_anyway(program, node, old, new):
            continue
        facts[node] = new
        _require_not_returned(node, new)
        for user in node.users:
            if user not in waiting and user.op != "output":
                waiting.add(user)
                heapq.heappush(work, user)
    return {n: f for n, f in facts.items() if n not in replaced}


def _is_computed_so_anyway(program: Program, node: Node, old: Any, new: Any) -> bool:
    """Do the facts differ in strides of size-1 dims alone, and does recomputing the node from its present operands give
    the new strides too?"""
    return difference(old, new) is None and same_strides(program.compute(node), new)


def _require_not_returned(node: Node, new: Any) -> None:
    """Refuse to change the strides of a returned value, which the caller sees, before anything downstream is computed.
    A gradient may get the strides of its tensor."""
    if any(user.op == "output" for user in node.users) and not is_gradient_that_fits(node, new):
        raise Refused(_problem(node, new).blaming(node))


def _problem(node: Node, new: Any) -> Refusal:
    size_one = "the stride of a dim of size 1 of {at} would change, and that could be seen"
    return difference(fact(node), new) or Refusal(size_one, at=node)


def _seen_by(observer: Node, changed: Node, new: Any) -> Refusal:
    """The strides of a value would change, and an operation on it may tell the difference."""
    problem = difference(fact(changed), new)
    if problem is None:
        return _problem(changed, new).blaming(changed)
    return replace(problem, sentence=f"{problem.sentence}, and {{at}} may depend on it", at=observer)


def require_same_place(program: Program, was: Node, now: Node) -> None:
    """Refuse a value with other strides, or another storage offset, where an operation reads these.

    The offset of an input is whatever the caller's tensor has, and no guard fixes it: only a value in the same memory
    has the same offset.
    """
    aliasing = program.aliasing
    if not aliasing.is_input(now) or aliasing.same(was, now):
        if _same_place(fact(was), fact(now)):
            return
    if (observer := _observer(program, was)) is not None:
        raise Refused("{at} may read strides and storage offset, which would differ", at=observer)


def _same_place(old: Any, new: Any) -> bool:
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(_same_place(a, b) for a, b in zip(old, new))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor)
    if old.layout is not torch.strided or new.layout is not torch.strided:
        return old.layout == new.layout
    return known_equal(old.stride(), new.stride()) and known_equal(old.storage_offset(), new.storage_offset())


def _observer(program: Program, value: Node) -> Node | None:
    """An operation on the value, or on a view of it, that may read strides and storage offset."""
    work, seen = [value], {value}
    while work:
        node = work.pop()
        for user in node.users:
            if user in seen or user.op == "output":
                continue
            if looks_beyond_values(program, user) or len(seen) > FURTHEST:
                return user
            seen.add(user)
            if node in program.aliasing.effects(user).aliases:
                work.append(user)
    return None


def looks_beyond_values(program: Program, node: Node) -> bool:
    """May the operation distinguish operands with equal elements, by strides, storage offset or address?"""
    target = node.target
    if isinstance(target, _private.HigherOrderOperator) or of_a_library(target):
        return True
    if isinstance(target, _private.OpOverload) and target.namespace not in KNOWN_NAMESPACES:
        return True
    call = program.call(node)
    return call is not None and call.op in READS_LAYOUT


def _is_blind(program: Program, node: Node) -> bool:
    """Does the operation compute the same values whatever the strides of its operands are?"""
    call = program.call(node)
    if call is None or looks_beyond_values(program, node) or not program.aliasing.effects(node).pure:
        return False
    return not packet_tags(call.op) & SIZE_FROM_DATA  # recomputing it would create new unbacked sizes


def _require_same_sharing(program: Program, node: Node, old: Any, new: Any, facts: Mapping[Node, Any]) -> None:
    """Because of other strides a view may become a copy (`reshape`, `contiguous`) or the other way round. Then at most
    one of the values in that memory may be returned, and none may be an input or be written."""
    operands = list(node_operands((node.args, node.kwargs)))
    before = sharing(old, [fact(n) for n in operands])
    if before == sharing(new, [facts.get(n, fact(n)) for n in operands]):
        return
    aliasing = program.aliasing
    memories = {aliasing.memory(n): aliasing.output_uses(n) for n in (node, *operands) if n is node or n in facts}
    if sum(memories.values()) > 1 or any(aliasing.written(n) or aliasing.is_input(n) for n in memories):
        raise Refused("{at} would share other memory than before", at=node)
