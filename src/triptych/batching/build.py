"""Emits a plan: each group is built once, and a member is sliced out of the stack only for users that need it alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..cost import DeviceModel, bytes_of
from ..ir.facts import same_layout, tensor_of
from ..ir.program import Program, Value
from ..rewrite.clones import copied_as
from ..rewrite.emit import Emitter
from .plan import Group, Plan
from .stacked import Stacked, stack


class Builder:
    """Emits the groups of a plan, in its order."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.built: dict[Group, Stacked] = {}

    def build(self, op: Emitter, group: Group) -> Stacked:
        call = self.program.call(group.nodes[0])
        assert call is not None
        operands = [] if group.recipe.gathers else [self._operand(op, n) for n in zip(*(m.data for m in group.members))]
        stacked = self.built[group] = group.recipe.build(op, group, operands, call)
        return stacked

    def _operand(self, op: Emitter, nodes: Sequence[Node]) -> Stacked:
        if all(n is nodes[0] for n in nodes):
            return Stacked(Value(self.program, nodes[0]), None)
        source, indices = stack_of(self.plan, nodes)
        if source is None:
            return stack(op, nodes)
        whole = self.built[source]
        if len(indices) == len(source):
            return whole
        assert whole.axis is not None
        return Stacked(op.slice(whole.value, whole.axis, indices[0], indices[-1] + 1), whole.axis)

    def members(self, op: Emitter, group: Group, wanted: Sequence[Node]) -> list[Value]:
        """Slices single members out of a stacked result, with the strides that they had before."""
        if not wanted:
            return []
        stacked = self.built[group]
        place = {node: i for i, node in enumerate(group.nodes)}
        if stacked.axis is None:  # separate results: nothing was stacked
            return [op.getitem(stacked.value, place[node]) for node in wanted]
        parts = op.unbind(stacked.value, dim=stacked.axis)
        values = []
        for node in wanted:
            value = op.getitem(parts, place[node])
            old = tensor_of(node)
            if self.program.aliasing.is_output(node) or not same_layout(old, tensor_of(value.node)):
                value = copied_as(op, value, old)
            values.append(value)
        return values


def stack_of(plan: Plan, nodes: Sequence[Node]) -> tuple[Group | None, list[int]]:
    """The group of which these are the members, adjacent and in order; None if there is none."""
    places = [plan.place.get(n) for n in nodes]
    groups = {p[0] if p is not None else None for p in places}
    indices = [p[1] for p in places if p is not None]
    if len(groups) != 1 or None in groups or indices != list(range(indices[0], indices[0] + len(nodes))):
        return None, []
    return groups.pop(), indices


def taken_out(plan: Plan, groups: Sequence[Group]) -> set[Node]:
    """The operands that these groups read one by one, not as the stacked result of another of these groups."""
    single: set[Node | None] = set()
    for group in groups:
        single.update(w for m in group.members for w in m.weights)
        for nodes in zip(*(m.data for m in group.members)):
            if group.recipe.gathers or all(n is nodes[0] for n in nodes) or stack_of(plan, nodes)[0] is None:
                single.update(nodes)
    return {n for n in single if n is not None}


def estimate(
    model: DeviceModel, program: Program, plan: Plan, groups: Sequence[Group]
) -> tuple[float, float, float]:
    """Seconds without these groups, with these groups, and for the copies that stacking and unstacking add.

    In training the backward is counted too: two operations for each one, and another copy for each copy.
    """
    before = after = moved = 0.0
    chosen = set(groups)
    operations, moves = (3, 2) if program.is_training else (1, 1)
    for group in groups:
        first = tensor_of(group.nodes[0])
        alone, together = group.recipe.cost(model, group)
        before, after = before + operations * alone, after + operations * together
        if group.recipe.gathers:
            continue
        operands = [*zip(*(m.data for m in group.members)), *zip(*(m.weights for m in group.members))]
        for nodes in operands:
            if nodes[0] is None or all(n is nodes[0] for n in nodes) or program.computed_once(*nodes):
                continue
            source, _ = stack_of(plan, nodes)
            if source not in chosen:
                moved += moves * model.copy(2 * sum(bytes_of(tensor_of(n)) for n in nodes))
        # an output of the graph needs its own memory; other users read a member inside the stack
        returned = sum(any(user.op == "output" for user in node.users) for node in group.nodes)
        moved += moves * returned * model.copy(2 * bytes_of(first))
    return before, after, moved


def chains(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that are connected by stacked results, in order. The cost model judges each chain as a whole."""
    chain: dict[Group, list[Group]] = {}
    for group in groups:
        merged = chain[group] = [group]
        for feed in group.feeds:
            if (other := chain[feed]) is merged:
                continue
            small, merged = sorted((other, merged), key=len)
            merged.extend(small)
            chain.update(dict.fromkeys(small, merged))
    order = {group: i for i, group in enumerate(groups)}
    return [sorted(c, key=order.__getitem__) for c in {id(c): c for c in chain.values()}.values()]
