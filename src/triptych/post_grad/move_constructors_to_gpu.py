"""`move_constructors_to_gpu`: builds a tensor on the GPU if it is built on the CPU but used only on the GPU.

This saves the transfer, and lets the whole graph be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.devices import computes_alike, not_taken_over, unlike_elsewhere
from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import EraseUnused, ReplaceAll, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule
from ..rules.other_device import again_elsewhere, end_elsewhere

CONSTRUCTORS = frozenset("full arange scalar_tensor eye tril_indices triu_indices prims.iota".split())
"""Operations that build a tensor from numbers alone, with the same bits on every device (see `unlike_elsewhere`)."""


META: dict[str, Any] = {"same_values": False, "dialects": ("aten",)}


class BuildOnGpu(Rule):
    """to(f(full(...)), gpu), x[f(arange(...))] -> the same with the constructor, and f, on the GPU

    Constructors move together with the values that are computed from them. The rule declines if an operation on the CPU
    uses one of these values, if one is written or returned, or if the GPU could compute other bits.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for group in _groups(program):
            if not group.devices:
                continue
            if group.problem is None and len(group.devices) > 1:
                group.problem = Refusal("it is used on several devices", found=sorted(map(str, group.devices)))
            if group.problem is not None:
                yield Match.at(program, group.nodes[0], problem=group.problem)
            else:
                names = [self.name] * len(group.ends)
                yield Match.at(program, *group.ends, covers=group.nodes, names=names, group=group)

    def rewrite(self, op, group):
        (device,) = group.devices
        twins: dict[Node, Node] = {}
        for node in _needed(group):
            extra = {} if any(o in twins for o in node.all_input_nodes) else {"device": device}
            twins[node] = again_elsewhere(op.at(node), node, twins, extra)
        ends = [(end, op.at(end)) for end in group.ends]
        replaced = [Replacement((end,), end_elsewhere(end, twins, at), at, (end,)) for end, at in ends]
        return Together([ReplaceAll(replaced), EraseUnused(sorted(group.nodes))])

    examples = [
        fires(lambda x: x + torch.arange(8).to("meta"), torch.empty(4, 8, device="meta"), **META),
        fires(lambda x: (x + (i := (torch.arange(8) * 2).to("meta")), i.sin()), torch.empty(4, 8, device="meta"),
              **META),
        fires(lambda x: x[torch.arange(2) + 1], torch.empty(4, 8, device="meta"), **META),
        declines(lambda x: (i := torch.arange(2), x[i]), torch.empty(4, 8, device="meta"), because="is returned",
                 **META),
        declines(lambda x: x + torch.arange(0, 1, 0.125).to("meta"), torch.empty(4, 8, device="meta"), because="steps",
                 **META),
        declines(lambda x: x[torch.arange(2)] + torch.full((), 2.0), "f32[4, 8]"),
    ]  # fmt: skip


@dataclass(frozen=True)
class MoveConstructorsToGpu(Pass):
    """Builds a tensor, and the values computed from it, on the GPU if nothing on the CPU uses them."""

    name = "move_constructors_to_gpu"

    def rules(self) -> Sequence[Rule]:
        return (BuildOnGpu(),)


@dataclass
class _Group:
    """Constructors that are connected by their uses, with the values on the CPU that are computed from them."""

    nodes: list[Node] = field(default_factory=list)
    ends: dict[Node, None] = field(default_factory=dict)
    """Operations that take a value of the group to a GPU."""
    devices: set[torch.device] = field(default_factory=set)
    problem: Refusal | None = None


def _groups(program: Program) -> list[_Group]:
    """The groups, in one walk: a value that depends on several groups merges them."""
    belongs: dict[Node, _Group] = {}
    for node in program.graph.nodes:
        call = program.call(node)
        if call is None or call.mutates:
            continue
        operands, is_constructor = node.all_input_nodes, call.op in CONSTRUCTORS
        if not is_constructor and (not belongs or belongs.keys().isdisjoint(operands)):
            continue
        result = tensor_fact(node)
        if result is None or result.device.type != "cpu":
            continue
        if is_constructor:
            if all(tensor_fact(o) is None for o in operands):
                unlike = unlike_elsewhere(call, result)
                belongs[node] = _Group([node], problem=None if unlike is None else Refusal(unlike, at=node))
        elif computes_alike(program, node, call, result):
            if all(o in belongs or tensor_fact(o) is None for o in operands):
                group = _joined(belongs, [o for o in operands if o in belongs])
                group.nodes.append(node)
                belongs[node] = group
    for node, group in belongs.items():
        _look_at_users(program, node, group, belongs)
    return list({id(g): g for g in belongs.values()}.values())


def _joined(belongs: dict[Node, _Group], operands: list[Node]) -> _Group:
    """Merges the groups of the operands into the largest of them, so that few nodes change their group."""
    groups = sorted({id(g): g for g in (belongs[o] for o in operands)}.values(), key=lambda g: -len(g.nodes))
    first = groups[0]
    for group in groups[1:]:
        first.nodes.extend(group.nodes)
        first.problem = first.problem or group.problem
        for node in group.nodes:
            belongs[node] = first
    return first


def _look_at_users(program: Program, node: Node, group: _Group, belongs: dict[Node, _Group]) -> None:
    aliasing = program.aliasing
    if aliasing.written(node) or not aliasing.effects(node).pure:
        group.problem = Refusal("{at} is written", at=node)
    for user in node.users:
        if belongs.get(user) is group:
            continue
        call, result = program.call(user), tensor_fact(user)
        if user.op == "output":
            group.problem = Refusal("{at} is returned", at=node)
        elif call is None or call.mutates or result is None or result.device.type == "cpu":
            group.problem = Refusal("{at} uses it on the CPU", at=user)
        else:
            group.ends[user] = None
            group.devices.add(result.device)
            group.problem = group.problem or not_taken_over(call, user, node)


def _needed(group: _Group) -> list[Node]:
    """The nodes of a group that a GPU operation depends on, in the order of the graph."""
    members = set(group.nodes)
    work = [operand for end in group.ends for operand in end.all_input_nodes]
    needed: set[Node] = set()
    while work:
        node = work.pop()
        if node in members and node not in needed:
            needed.add(node)
            work += node.all_input_nodes
    return sorted(needed)
