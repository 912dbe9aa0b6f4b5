"""group_batch_fusion_passes: many small equal operations become one batched operation, and chains stay stacked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..batching.build import Builder, apart, batched, chains, taken_out
from ..batching.plan import Group, Member, Plan, find_groups
from ..batching.recipes import (
    BatchAlongDims,
    BatchLinear,
    BatchMatmul,
    BatchNormalization,
    BatchPointwise,
    GroupLinear,
    Recipe,
)
from ..cost.decision import Decision, choose
from ..ir.facts import tensor_fact
from ..ir.gradients import reached_by_gradients
from ..ir.order import nearest_order, predecessors
from ..ir.program import Program
from ..kernels import triton_is_there
from ..rewrite.edits import Arrange, ReplaceAll
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rewriter import Replacement
from ..rewrite.rule import Match, Rule
from .fuse_split_linear_add_pass import FuseSplitLinearAddPass, layers_to_join


@dataclass(frozen=True, eq=False)
class Chain:
    """Groups that feed one another, with the names that their rewrites are counted under."""

    plan: Plan
    groups: Sequence[Group]
    names: Sequence[str]
    decision: Decision | None
    """Whether batching them pays; None if that is not asked."""
    edits: list[Replacement] = field(default_factory=list)
    """The edits of the last rewrite; if it was refused, the nodes that they emitted are gone."""

    @property
    def is_built(self) -> bool:
        return bool(self.edits) and bool(self.edits[0].op.made)


@dataclass(frozen=True)
class BatchRule(Rule, ABC):
    """f(x_0), f(x_1), ... -> f of the stack of all x_i: what the rules of this pass have in common.

    The nodes are first put into an order in which the members of each group stand side by side, and afterwards into
    the order nearest to the original one.
    """

    min_group: int = 4
    """The smallest number of equal operations that are batched."""
    always: bool = False
    """Rewrite without asking the cost model."""

    exact = False
    takes_random = True

    @abstractmethod
    def recipes(self, program: Program) -> Sequence[Recipe]:
        """The recipes for the operations that this rule batches."""

    def sites(self, program: Program) -> Iterator[Match]:
        nodes = list(program.graph.nodes)
        plan = self._plan(program, nodes)
        planned = [] if plan is None else [self._chain(program, plan, groups) for groups in chains(_sensible(plan))]
        profitable = [chain for chain in planned if chain.decision is None or chain.decision.pays]
        for chain in planned:
            if chain not in profitable:
                yield self._site(program, chain)
        if plan is None or not profitable:
            return
        profitable_groups = {group for chain in profitable for group in chain.groups}
        plan.place = {node: place for node, place in plan.place.items() if place[0] in profitable_groups}
        first, rank = profitable[0].groups[0].nodes[0], {node: i for i, node in enumerate(nodes)}
        yield Match.at(program, first, names=(), order=plan.order)
        replacements: dict[Node, Node] = {}  # the replacements of members of the chains built so far
        for chain in profitable:
            for group in chain.groups:
                group.members = [m.on(replacements) for m in group.members]
            yield self._site(program, chain)
            if chain.is_built:
                for edit, group in zip(chain.edits, chain.groups):
                    replacements.update(zip(edit.olds, (v.node for v in edit.new)))
                    place = max(rank[n] for n in group.nodes)
                    rank.update((n, place) for n in edit.op.made)
        before = predecessors(program, list(program.graph.nodes), _may_draw_otherwise(program))
        *_, output = program.graph.nodes
        yield Match.at(program, output, names=(), order=nearest_order(before, rank))

    def _chain(self, program: Program, plan: Plan, groups: Sequence[Group]) -> Chain:
        names = [_name(program, g) for g in groups]
        if self.always:
            return Chain(plan, groups, names, None)
        decision = choose(apart(program, groups), batched(program, plan, groups), program.options.tune)
        return Chain(plan, groups, names, decision)

    def _site(self, program: Program, chain: Chain) -> Match:
        first = chain.groups[0].nodes[0]
        return Match.at(program, first, before=first, names=chain.names, chain=chain)

    def _plan(self, program: Program, nodes: Sequence[Node]) -> Plan | None:
        recipes = self.recipes(program)
        members = {n: m for n in nodes if (m := _member(program, n, recipes)) is not None} if recipes else {}
        for node in _left_to_others(program) & members.keys():
            del members[node]
        if len(members) < self.min_group:
            return None
        if program.is_training:
            # an input that no gradient reaches has None for its gradient; in a stack with others it would get zeros
            reached = reached_by_gradients(program)
            members = {n: replace(m, key=(m.key, n in reached)) for n, m in members.items()}
        return find_groups(predecessors(program, nodes, _may_draw_otherwise(program)), members.get, self.min_group)

    def check(self, m, chain):
        if chain is not None and chain.decision is not None:
            m.accept(chain.decision)

    def rewrite(self, op, m, chain):
        if chain is None:
            return Arrange(m.bindings["order"])
        builder = Builder(m.program, chain.plan)
        members = {node for group in chain.groups for node in group.nodes}
        read_alone = taken_out(chain.plan, chain.groups)
        chain.edits.clear()
        for group, name in zip(chain.groups, chain.names):
            at = op.at(group.nodes[0], name)
            builder.build(at, group)
            singles = tuple(n for n in group.nodes if n in read_alone or any(u not in members for u in n.users))
            values = builder.members(at, group, singles)
            chain.edits.append(Replacement(singles, values, at, tuple(group.nodes), self))
        return ReplaceAll(chain.edits)


def _name(program: Program, group: Group) -> str:
    call = program.call(group.nodes[0])
    assert call is not None
    return group.recipe.name(call)


def _may_draw_otherwise(program: Program) -> bool:
    """May dropout draw other numbers than eager?"""
    return program.options.codegen == "inductor" and not program.options.fallback_random


@dataclass(frozen=True)
class BatchOperations(BatchRule):
    """f(x_0), f(x_1), ... -> f(stack(x_0, x_1, ...)), for linears, products, norms, pointwise operations and views;
    chains stay stacked; up to rounding"""

    def counts_as(self, name: str) -> bool:
        of_the_last_stage = name.startswith("batch_aten") or name.endswith("_post_grad")
        return name.startswith("batch_") and not of_the_last_stage

    def recipes(self, program: Program) -> Sequence[Recipe]:
        pointwise = BatchPointwise(draws=_may_draw_otherwise(program))
        return (BatchLinear(), BatchMatmul(), BatchNormalization(), pointwise, BatchAlongDims())


@dataclass(frozen=True)
class GroupLinears(BatchRule):
    """linear(x_0, W_0), linear(x_1, W_1), ... of different sizes -> all of them in one launch; up to rounding"""

    def counts_as(self, name: str) -> bool:
        return name in (self.name, "group_linear")

    def recipes(self, program: Program) -> Sequence[Recipe]:
        return (GroupLinear(),) if self.always or kernel_runs(program) else ()


@dataclass(frozen=True)
class GroupBatchFusionPasses(Pass):
    """Batches many small operations of one kind and shape into one operation. Up to rounding, since one GEMM may sum in
    another order than many.

    Chains of batched operations stay stacked from one operation to the next, and a member is sliced out only for a
    user that is not batched itself. The pass declines chains for which the cost model expects no gain.
    """

    name: ClassVar[str] = "group_batch_fusion_passes"
    min_group: int = 4
    """The smallest number of equal operations that are batched."""
    group_linear: bool | None = None
    """Compute linears of different sizes in one launch: always, never, or (None) on a GPU where it pays."""

    def rules(self) -> Sequence[Rule]:
        batched = BatchOperations(self.min_group)
        if self.group_linear is False:
            return (batched,)
        return (batched, GroupLinears(self.min_group, bool(self.group_linear)))


def _left_to_others(program: Program) -> set[Node]:
    """Linear layers over the pieces of one value whose results are summed: `fuse_split_linear_add_pass` makes one layer
    of these, so they are not batched."""
    if FuseSplitLinearAddPass.name in program.options.remove_passes:
        return set()
    return layers_to_join(program)


def _member(program: Program, node: Node, recipes: Sequence[Recipe]) -> Member | None:
    call = program.call(node)
    if call is None:
        return None
    member = next((m for r in recipes if (m := r.member(program, node, call)) is not None), None)
    return replace(member, written=True) if member is not None and program.aliasing.written(node) else member


def kernel_runs(program: Program) -> bool:
    """Can our own kernels run? They need a GPU, Triton, and Inductor to call them from generated code."""
    on_gpu = any(t.device.type == "cuda" for n in program.graph.nodes if (t := tensor_fact(n)) is not None)
    return program.options.codegen == "inductor" and on_gpu and triton_is_there()


def _sensible(plan: Plan) -> list[Group]:
    """The groups that are worth batching: their members have different operands, and they continue another group or may
    begin a chain. Views are dropped unless all their users are batched."""
    worth = {g for g in plan.groups if len({(m.data, m.weights) for m in g.members}) > 1}
    before = 0
    while before != len(worth):  # dropping a group may make the groups after and before it useless
        before = len(worth)
        for group in plan.groups:
            group.feeds &= worth
            if not group.feeds and not _may_begin(group):
                worth.discard(group)
        needed: set[Node] = set()
        for group in reversed(plan.groups):
            # a view with a user that is not batched costs nothing as a view of the single member
            if group in worth and not group.recipe.leads and any(u not in needed for n in group.nodes for u in n.users):
                worth.discard(group)
            if group in worth:
                needed.update(group.nodes)
    plan.place = {node: place for node, place in plan.place.items() if place[0] in worth}
    return [group for group in plan.groups if group in worth]


def _may_begin(group: Group) -> bool:
    """May the group begin a chain? A pointwise operation is fused into the kernel that computes its operand, so it
    begins a chain only if all its operands are inputs or attributes of the graph."""
    if not isinstance(group.recipe, BatchPointwise):
        return group.recipe.leads
    return all(n.op in ("placeholder", "get_attr") for m in group.members for n in m.data)


def _each(f: Any) -> Any:
    """For examples: f of each of eight inputs."""
    return lambda *xs: [f(x) for x in xs[:8]]


def _linears(*more: Any) -> Any:
    """For examples: eight linears, each of its own input and weight, and what follows each of them."""

    def run(*values: Any) -> Any:
        results = [F.linear(x, w) for x, w in zip(values[:8], values[8:16])]
        for f in more:
            results = [f(y) for y in results]
        return torch.cat(results)

    return run


def _of_one_input(x: Any, *weights: Any) -> Any:
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights[:8], weights[8:])], 1)


def _towers(x: Any, *weights: Any) -> Any:
    """linear - layer norm - relu - linear - sigmoid, eight times, the second linear with the first's weight."""
    wide = [F.linear(x, w, b) for w, b in zip(weights[:8], weights[8:])]
    hidden = [torch.relu(F.layer_norm(h, (16,), b, b)) for h, b in zip(wide, weights[8:])]
    return torch.stack([torch.sigmoid(F.linear(h, w)) for h, w in zip(hidden, weights[:8])])


def _of_any_sizes(*values: Any) -> Any:
    half = len(values) // 2
    return [F.linear(x, w).relu() for x, w in zip(values[:half], values[half:])]


def _two_depths(*values: Any) -> Any:
    """Half of the towers are one layer deeper."""
    xs = [torch.tanh(F.linear(x, w)) for x, w in zip(values[:8], values[8:])]
    return torch.cat([F.linear(x, w) if i % 2 else x for i, (x, w) in enumerate(zip(xs, values[8:]))])


def _residual(*values: Any) -> Any:
    return sum(x + F.linear(x, w) * 0.5 for x, w in zip(values[:8], values[8:]))


def _one_after_the_other(x: Any, *weights: Any) -> Any:
    for w in weights:
        x = F.linear(x, w)
    return x


def _write_in_between(x: Any, *weights: Any) -> Any:
    """`_of_one_input`, which fires, with a write of x after each linear: no two of them read the same x."""
    results = []
    for w, b in zip(weights[:8], weights[8:]):
        results.append(F.linear(x, w, b))
        x.add_(1)
    return torch.cat(results, 1)


def _members_returned(*values: Any) -> Any:
    results = [F.linear(x, w) for x, w in zip(values[:8], values[8:])]
    return [r.relu() for r in results], results[3]


X, W, B = ("f32[4, 16]",) * 8, ("f32[16, 16]",) * 8, ("f32[16]",) * 8
SIZES = (*("f32[4, 16]", "f32[8, 2]", "f32[2, 3, 5]") * 2, *("f32[3, 16]", "f32[1, 2]", "f32[7, 5]") * 2)
TORCH: dict[str, Any] = {"dialects": ["torch"]}
BatchOperations.examples = [
    fires(_of_one_input, X[0], *W, *B, **TORCH),
    fires(_of_one_input, "f32[2, 3, 16]", *W, *B, **TORCH),
    fires(_of_one_input, X[0], *W, *B, dynamic=True, **TORCH),
    fires(_of_one_input, "bf16[4, 16]", *["bf16[16, 16]"] * 8, *["bf16[16]"] * 8, **TORCH),
    fires(_towers, X[0], *W, *B, **TORCH),
    fires(_towers, X[0], *W, *B, dynamic=True, **TORCH),
    fires(_towers, "f64[4, 16]", *["f64[16, 16]"] * 8, *["f64[16]"] * 8, **TORCH),
    fires(_linears(), *X, *W, **TORCH),
    fires(_linears(), *["f32[2, 3, 16]"] * 8, *W, **TORCH),
    fires(_linears(torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.nan_to_num), *X, *W, **TORCH),
    fires(_linears(lambda x: x.clamp(-1, 1), torch.detach, lambda x: (x + 1) / 2 - x * 3), *X, *W, **TORCH),
    fires(_linears(lambda x: F.rms_norm(x, (16,), eps=1e-6), lambda x: F.layer_norm(x, (16,))), *X, *W, **TORCH),
    fires(_linears(lambda x: x.softmax(-1), lambda x: x.view(2, 2, 16).sum(1).transpose(0, 1).relu()), *X, *W, **TORCH),
    fires(_linears(lambda x: F.dropout(x, 0.5)), *X, *W, same_values=False, **TORCH),
    fires(_two_depths, *X, *W, **TORCH),
    fires(_residual, *X, *W, **TORCH),
    fires(_members_returned, *X, *W, **TORCH),
    fires(lambda *v: torch.cat([x @ w for x, w in zip(v[:8], v[8:])]), *X, *W),
    fires(lambda *v: torch.cat([x.sigmoid() for x in v]), *X * 4, settings={"min_group": 32}),
    declines(_of_any_sizes, *SIZES, **TORCH),
    declines(lambda x, a, b, c: torch.cat([F.linear(x, w) for w in (a, b, c)]), X[0], *W[:3], **TORCH),
    declines(_one_after_the_other, X[0], *W, **TORCH),
    declines(lambda x, *w: sum(F.linear(p, v) for p, v in zip(x.chunk(8, -1), w)), "f32[4, 128]", *W, **TORCH),
    fires(lambda x, *w: sum(F.linear(p, v) for p, v in zip(x.chunk(8, -1), w)), "f32[4, 128]", *W,
          options={"remove_passes": "fuse_split_linear_add_pass"}, **TORCH),
    declines(_of_one_input, X[0], *[f"f32[{n}, 16]" for n in range(8)], *[f"f32[{n}]" for n in range(8)], **TORCH),
    declines(_write_in_between, X[0], *W, *B, **TORCH),
    declines(lambda x, *w: [F.linear(x, w[0]) for _ in range(8)], X[0], *W, **TORCH),
    declines(_linears(), *["f32[2048, 16]"] * 8, *W, because="would cost", **TORCH),
    declines(_each(lambda x: x.relu().sigmoid()), *["f32[512, 512]"] * 8, because="would cost"),
]
GroupLinears.examples = [
    fires(_of_any_sizes, *SIZES, settings={"always": True}, **TORCH),
    declines(_of_any_sizes, *SIZES, **TORCH),
    declines(_one_after_the_other, X[0], *W, settings={"always": True}, **TORCH),
]
