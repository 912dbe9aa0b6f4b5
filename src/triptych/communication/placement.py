"""Where several collectives can be started as one, and where they can be waited for.

Only the order of the graph and the sizes of the communicated tensors decide. Both are the same on every rank, so every
rank makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..ir.collectives import Collective
from ..ir.order import predecessors
from ..ir.program import Program


class Order:
    """Which nodes of a graph must come before which; collectives are ordered only by their data dependencies."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.before: Mapping[Node, Sequence[Node]] = predecessors(program, self.nodes, free_collectives=True)

    def dependents(self, roots: Collection[Node]) -> dict[Node, None]:
        """The nodes that must come after one of `roots`, without `roots`; in graph order."""
        behind = dict.fromkeys(roots)
        for node in self.nodes:
            if node not in behind and any(n in behind for n in self.before[node]):
                behind[node] = None
        return dict.fromkeys(n for n in behind if n not in roots)

    def requirements(self, roots: Collection[Node], after: Node) -> list[Node]:
        """The nodes after `after` that are `roots` or must come before one of them; in graph order."""
        needed = set(roots)
        late: list[Node] = []
        for node in reversed(self.nodes):
            if node is after:
                break
            if node in needed:
                late.append(node)
                needed.update(self.before[node])
        return late[::-1]


@dataclass(frozen=True)
class Placement:
    """Where a bucket is started and waited for, and which nodes move out of its way."""

    launch: Node
    """The collective goes before this node."""
    wait: Node
    """The wait goes before this node."""
    before_launch: Sequence[Node] = ()
    """Nodes to move before the collective, in this order."""
    after_wait: Sequence[Node] = ()
    """Nodes to move after the wait, in this order."""


def after(node: Node) -> Node:
    """The node before which to insert something that needs this one: the next node that is no placeholder."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def placement(
    program: Program, members: Sequence[Collective], at_first: bool = False, at_end: bool = False
) -> Placement | None:
    """Where to put one collective for several; None if one of them needs the result of another.

    The collective starts after its last operand, and nodes before that point which need a result move after the wait.
    With `at_first`, it starts where the first member was, and the operands of the others move before it. The wait
    stands before the first node that needs a result. With `at_end`, it stands at the end of the graph, and all nodes
    that need a result move there, too.
    """
    if not at_first:
        launch = after(max(operand for member in members for operand in member.operands))
        first = min(wait for member in members for wait in member.waits)
        if not first < launch:  # no node before the launch needs a result: nothing has to move
            return Placement(launch, first)
    order = Order(program)
    place = {node: i for i, node in enumerate(order.nodes)}
    waits = [wait for member in members for wait in member.waits]
    operands = [operand for member in members for operand in member.operands]
    behind = order.dependents(waits)
    if any(operand in behind for operand in operands):
        return None
    output = order.nodes[-1]
    behind.pop(output, None)
    if at_first:
        launch = min((m.node for m in members), key=place.__getitem__)
        needed = order.requirements(operands, launch)
    else:
        launch, needed = after(max(operands, key=place.__getitem__)), []
    if at_end:
        return Placement(launch, output, needed, list(behind))
    early = [node for node in behind if place[node] < place[launch]]
    late = (node for node in behind if place[node] >= place[launch])
    return Placement(launch, min(late, key=place.__getitem__, default=output), needed, early)
