"""Emits a plan: each group is built once, and a member is sliced out of the stack only for users that need it alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from ..cost import Moved, Work, read_and_written
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


def apart(program: Program, groups: Sequence[Group]) -> Work:
    """The operations of these groups, one by one. In training the backward of each has two operations."""
    one_by_one = Work.of(_device(groups), (group.recipe.apart(group) for group in groups))
    return (3 if program.is_training else 1) * one_by_one


def batched(program: Program, plan: Plan, groups: Sequence[Group]) -> Work:
    """These groups, and the copies that stacking and unstacking add: in training twice, for the backward."""
    together = Work.of(_device(groups), (group.recipe.together(group) for group in groups))
    copies = Work.of(_device(groups), (_copies(program, plan, group, set(groups)) for group in groups))
    return 3 * together + 2 * copies if program.is_training else together + copies


def _device(groups: Sequence[Group]) -> torch.device:
    return tensor_of(groups[0].nodes[0]).device


def _copies(program: Program, plan: Plan, group: Group, chosen: set[Group]) -> Iterator[Moved]:
    """The copies of operands into a stack, and of members out of it."""
    if group.recipe.gathers:
        return
    for nodes in [*zip(*(m.data for m in group.members)), *zip(*(m.weights for m in group.members))]:
        if nodes[0] is None or all(n is nodes[0] for n in nodes) or program.computed_once(*nodes):
            continue
        source, _ = stack_of(plan, nodes)
        if source not in chosen:
            yield read_and_written(*map(tensor_of, nodes), times=2)
    # an output of the graph needs its own memory; other users read a member inside the stack
    for node in group.nodes:
        if any(user.op == "output" for user in node.users):
            yield read_and_written(tensor_of(node), times=2)


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
