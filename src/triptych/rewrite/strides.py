"""Where a value comes to lie otherwise in memory: does anybody see it, or does the difference die out on the way?"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch.fx import Node

from ..ir.effects import node_operands
from ..ir.facts import difference, fact, sharing
from ..ir.program import Program
from ..ir.traits import is_gemm, is_pointwise, is_view

FAR = 32
"""Values that a difference is followed through before it is given up."""


def seen_by_none(program: Program, was: Node, new: torch.Tensor) -> list[Node] | None:
    """The values whose strides or memory change if `was` lies as `new` does; None if a write or the caller could tell.

    `attention(...).transpose(1, 2).contiguous()` is contiguous whatever the attention's strides are.
    """
    aliasing = program.aliasing
    facts: dict[Node, Any] = {was: new}
    changed: list[Node] = []
    order: dict[Node, None] = dict.fromkeys(was.users)
    work = list(order)
    heapq.heapify(work)
    while work:
        node = heapq.heappop(work)
        old, call = fact(node), program.call(node)
        if node.op == "output" or call is None or call.mutates or old is None or len(changed) == FAR:
            return None
        seen = aliasing.effects(node)
        plain = is_view(call.op) or is_pointwise(call.op) or is_gemm(call.op) or call.op == "contiguous"
        if seen.writes or seen.kept or seen.barrier or not plain:  # a reduction may go another way, and round otherwise
            return None
        try:
            made = program.compute(node, lambda n: facts.get(n, fact(n)))
        except Exception:  # a view that cannot be had of such memory
            return None
        if made is None or difference(old, made, strides=False):
            return None
        operands = list(node_operands((node.args, node.kwargs)))
        before, after = [fact(o) for o in operands], [facts.get(o, fact(o)) for o in operands]
        same_memory = sharing(old, before) == sharing(made, after)
        if not same_memory and any(aliasing.written(n) or aliasing.is_output(n) for n in (was, node)):
            return None
        if same_memory and difference(old, made) is None and not seen.aliases:
            continue
        changed.append(node)
        facts[node] = made
        if difference(old, made) is None:
            continue
        for user in node.users:
            if user not in order:
                order[user] = None
                heapq.heappush(work, user)
    return changed
