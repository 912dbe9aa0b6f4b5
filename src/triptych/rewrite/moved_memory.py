"""Views of a value that lies in other memory after a rewrite: whose memory they see, and who shares it now."""

from __future__ import annotations

import contextlib
import heapq
from typing import Any

from torch.fx import Node

from ..ir.effects import Effects
from ..ir.facts import fact, storage, update_fact
from ..ir.program import Program


def views_moved(program: Program, user: Node, left: int | None, past_writes: bool = True) -> None:
    """A user of a replaced value, and the views made of it, see the memory of the new value.

    `left` is the memory that the value lay in before; None if that is the same. Views of that memory are followed as
    far as there are any, and each gets a new fact. A value with memory of its own, as a reshape that copies, keeps it:
    there the walk ends, so that a long chain is not walked again for every rewrite in it. Without `past_writes` it ends
    at writes too: a write shares memory with what it writes whatever its fact says, and views of it go by its fact.
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
    with contextlib.suppress(Exception):  # the old fact is right in all but the memory
        update_fact(node, program.compute(node), program.fact_key)


def _lies_in(value: Any, memory: int) -> bool:
    """Is it in that memory, or one of several that are? What nothing is known of may be."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return value is None or any(storage(part) in (memory, None) for part in parts)
