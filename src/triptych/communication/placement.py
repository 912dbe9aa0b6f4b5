"""Where several collectives can be started as one, and where they can be waited for.

The order of the graph is the only thing that decides, with the sizes of what is communicated: both are the same on
every rank, so every rank takes the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..ir.collectives import Collective
from ..ir.order import predecessors
from ..ir.program import Program


class Order:
    """What must come before what in a graph, where collectives keep to the data only."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.before: Mapping[Node, Sequence[Node]] = predecessors(program, self.nodes, free_collectives=True)

    def dependents(self, roots: Collection[Node]) -> dict[Node, None]:
        """What must stand behind one of these nodes, in the order of the graph."""
        behind = dict.fromkeys(roots)
        for node in self.nodes:
            if node not in behind and any(n in behind for n in self.before[node]):
                behind[node] = None
        return dict.fromkeys(n for n in behind if n not in roots)

    def requirements(self, roots: Collection[Node], after: Node) -> list[Node]:
        """What stands behind `after` and must stand before one of these nodes, itself included; in graph order."""
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
    """Nodes to move before the collective, in turn."""
    after_wait: Sequence[Node] = ()
    """Nodes to move behind the wait, in turn."""


def after(node: Node) -> Node:
    """The node before which something stands that needs this one."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def placement(
    program: Program, members: Sequence[Collective], at_first: bool = False, at_end: bool = False
) -> Placement | None:
    """Where to put one collective for several; None where one of them needs the result of another.

    It is started behind its last operand, and what needs a result moves behind that; or, `at_first`, where the first
    member was, and operands of the others move before it. It is waited for before the first node that needs a result,
    or, `at_end`, at the end of the graph, where all that needs a result moves too.
    """
    if not at_first:
        launch = after(max(operand for member in members for operand in member.operands))
        first = min(wait for member in members for wait in member.waits)
        if not first < launch:  # nothing that needs a result stands before the place: nothing has to move
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
