"""In which orders a graph can run: what must come before what, and the order nearest to a given one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch.fx import Node

from .collectives import awaited, collective, is_wait
from .program import Program


def predecessors(
    program: Program, nodes: Sequence[Node], free_draws: bool = False, free_collectives: bool = False
) -> dict[Node, list[Node]]:
    """For each node, the nodes that must come before it: its operands, and those that order its effects.

    Writes, random draws and regions keep their order, and a read stays on its side of a write. With `free_draws`
    random draws may change places among themselves. With `free_collectives` collectives and their waits are ordered by
    data dependencies only: the order of collectives may change, which is correct if it changes in the same way on every
    rank. A collective reads its operands until it is waited for.
    """
    aliasing = program.aliasing
    before: dict[Node, list[Node]] = {}
    effect: Node | None = None
    region: Node | None = None
    in_region: list[Node] = []
    writer: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        operands = node.all_input_nodes
        wanted = list(operands)
        seen = aliasing.effects(node)
        if is_wait(node) and (source := awaited(node)) is not None:
            operands = [*operands, *source.operands]
        if region is not None:
            wanted.append(region)
        for memory in {aliasing.memory(n) for n in operands if aliasing.written(n)}:
            if memory in writer:
                wanted.append(writer[memory])
            readers.setdefault(memory, []).append(node)
        for memory in {aliasing.memory(n) for n in seen.writes}:
            wanted.extend(n for n in readers.pop(memory, ()) if n is not node)
            writer[memory] = node
        if free_collectives and (is_wait(node) or collective(node) is not None):
            in_region.append(node)
            before[node] = wanted
            continue
        only_draws = seen.random and not (seen.writes or seen.kept or seen.barrier)
        if not seen.pure and not (free_draws and only_draws):
            if effect is not None:
                wanted.append(effect)
            effect = node
        if seen.barrier or node.op == "output":
            wanted.extend(in_region)
            region, in_region = node, []
        else:
            in_region.append(node)
        before[node] = wanted
    return before


def nearest_order(before: Mapping[Node, Sequence[Node]], rank: Mapping[Node, int]) -> list[Node]:
    """A topological order for `before` that follows the ranks: of the ready nodes, the lowest rank comes next."""
    waits = {node: len(set(wanted)) for node, wanted in before.items()}
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, wanted in before.items():
        for other in set(wanted):
            after[other].append(node)
    ready = [(rank[node], i, node) for i, (node, count) in enumerate(waits.items()) if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, _, node = heapq.heappop(ready)
        order.append(node)
        for other in after[node]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, (rank[other], len(order) + len(waits), other))
    return order
