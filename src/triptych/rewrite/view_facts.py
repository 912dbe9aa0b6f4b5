"""Facts of the views of a replaced value: recomputed where the replacement has other memory."""

from __future__ import annotations

import contextlib
import heapq
from typing import Any

from torch.fx import Node

from ..ir.effects import Effects
from ..ir.facts import fact, storage, update_fact
from ..ir.program import Program


def views_moved(program: Program, user: Node, left: int | None, past_writes: bool = True) -> None:
    """Recompute the facts of `user`, which uses a replaced value, and of the views of it: they alias the new value.

    `left` is the storage of the replaced value; None if the new value has the same. Views of that storage are followed
    transitively, and each gets a new fact. The walk ends at a value with its own storage, such as a reshape that
    copies, so that a long chain is not walked again for every rewrite in it. Without `past_writes` it ends at in-place
    writes too: a write aliases its target whatever its fact says, and views of it follow that fact.
    """
    aliasing = program.aliasing
    work, waiting = [user], {user}
    while work:
        node = heapq.heappop(work)
        seen = aliasing.effects(node)
        if not (seen.aliases or seen.writes):
            continue
        moves = left is not None and seen.aliases and (past_writes or not seen.writes) and _lies_in(fact(node), left)
        if moves:
            _compute_anew(program, node, seen)
        aliasing.refresh(node)
        for further in node.users if moves else ():
            if further.op != "output" and further not in waiting:
                waiting.add(further)
                heapq.heappush(work, further)


def _compute_anew(program: Program, node: Node, seen: Effects) -> None:
    call = program.call(node)
    if call is None or seen.random or call.op.startswith("higher"):
        return
    with contextlib.suppress(Exception):  # the old fact is wrong about the memory only
        update_fact(node, program.compute(node), program.fact_key)


def _lies_in(value: Any, memory: int) -> bool:
    """May the value, or a part of it, have that storage? A value without a fact may."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return value is None or any(storage(part) in (memory, None) for part in parts)
