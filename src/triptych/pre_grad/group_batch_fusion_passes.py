"""group_batch_fusion_passes: many small like operations become one, and chains of them stay stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..batching.build import Builder, chains, estimate, taken_out
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
from ..ir.facts import tensor_fact
from ..ir.gradients import reached_by_gradients
from ..ir.order import nearest_order, predecessors
from ..kernels import triton_is_there
from ..passes.base import PassRun
from ..rewrite.checks import PlainTerms
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rewriter import Replacement
from .fuse_split_linear_add_pass import FuseSplitLinearAddPass, layers_to_join


@dataclass(frozen=True)
class GroupBatchFusionPasses(Pass):
    """Many small like operations become one; a chain of them stays stacked from one to the next, and a member is
    taken out only for a user that is not batched itself. Up to rounding: one GEMM adds in another order than many.
    """

    name: ClassVar[str] = "group_batch_fusion_passes"
    exact: ClassVar[bool] = False
    min_group: int = 4
    """Fewer like operations than this stay as they are."""
    group_linear: bool | None = None
    """Linears of different sizes in one launch: always, never, or (None) on a GPU where it pays."""

    def run(self, run: PassRun) -> None:
        free_draws = run.options.codegen == "inductor" and not run.options.fallback_random
        pointwise = BatchPointwise(draws=free_draws)
        recipes = (BatchLinear(), BatchMatmul(), BatchNormalization(), pointwise, BatchAlongDims())
        self._batch(run, recipes, free_draws)
        if self.group_linear or (self.group_linear is None and _kernel_runs(run)):
            self._batch(run, (GroupLinear(),), free_draws, always=bool(self.group_linear))

    def _batch(self, run: PassRun, recipes: Sequence[Recipe], free_draws: bool, always: bool = False) -> None:
        nodes = list(run.program.graph.nodes)
        members = {n: m for n in nodes if (m := _member(run, n, recipes)) is not None}
        for node in _left_to_others(run) & members.keys():
            del members[node]
        if run.program.is_training:
            # an input that no gradient reaches has none; beside others in a stack it would get zeros
            reached = reached_by_gradients(run.program)
            members = {n: replace(m, key=(m.key, n in reached)) for n, m in members.items()}
        if len(members) < self.min_group:
            return
        plan = find_groups(predecessors(run.program, nodes, free_draws), members.get, self.min_group)
        worth = [chain for chain in chains(_sensible(plan)) if always or _pays(run, plan, chain)]
        if worth:
            _Batching(run, plan, nodes, free_draws).carry_out(worth)


def _kernel_runs(run: PassRun) -> bool:
    """Our own kernels need Triton, and somebody to call them from generated code."""
    on_gpu = any(t.device.type == "cuda" for n in run.program.graph.nodes if (t := tensor_fact(n)) is not None)
    return run.options.codegen == "inductor" and on_gpu and triton_is_there()


def _left_to_others(run: PassRun) -> set[Node]:
    """Layers over the pieces of one value whose results are added up: those are one layer, not one batch of them."""
    if FuseSplitLinearAddPass.name in run.options.remove_passes:
        return set()
    return layers_to_join(run.program)


def _member(run: PassRun, node: Node, recipes: Sequence[Recipe]) -> Member | None:
    call = run.program.call(node)
    if call is None:
        return None
    found = next((m for r in recipes if (m := r.member(run.program, node, call)) is not None), None)
    return replace(found, written=True) if found is not None and run.program.aliasing.written(node) else found


def _sensible(plan: Plan) -> list[Group]:
    """Groups in which something differs, and that follow another or begin with what lies in memory anyway."""
    kept = {g for g in plan.groups if len({(m.data, m.weights) for m in g.members}) > 1}
    before = 0
    while before != len(kept):  # one that goes may take with it what follows it, and what it follows
        before = len(kept)
        for group in plan.groups:
            group.feeds &= kept
            if not group.feeds and not _may_begin(group):
                kept.discard(group)
        needed: set[Node] = set()
        for group in reversed(plan.groups):
            # a view that is not batched on costs nothing where it is: taken from the member's own
            if group in kept and not group.recipe.leads and any(u not in needed for n in group.nodes for u in n.users):
                kept.discard(group)
            if group in kept:
                needed.update(group.nodes)
    plan.place = {node: place for node, place in plan.place.items() if place[0] in kept}
    return [group for group in plan.groups if group in kept]


def _may_begin(group: Group) -> bool:
    """What is computed element by element is part of the kernel that makes its operand, unless nothing does."""
    if not isinstance(group.recipe, BatchPointwise):
        return group.recipe.leads
    return all(n.op in ("placeholder", "get_attr") for m in group.members for n in m.data)


def _pays(run: PassRun, plan: Plan, chain: Sequence[Group]) -> bool:
    before, after, moved = estimate(run.program, plan, chain)
    first = chain[0].nodes[0]
    return run.pays(_name(run, chain[0]), first, before, after + moved, sure=not moved)


def _name(run: PassRun, group: Group) -> str:
    call = run.program.call(group.nodes[0])
    assert call is not None
    return group.recipe.name(call)


class _Batching:
    """Chains put into the graph, each whole or not at all."""

    def __init__(self, run: PassRun, plan: Plan, nodes: Sequence[Node], free_draws: bool) -> None:
        self.run, self.plan, self.free_draws = run, plan, free_draws
        self.rank = {node: i for i, node in enumerate(nodes)}
        self.terms = PlainTerms(takes_random=free_draws)
        self.now: dict[Node, Node] = {}
        """What stands for the members of chains that are in the graph already."""

    def carry_out(self, worth: Sequence[Sequence[Group]]) -> None:
        chosen = {group for chain in worth for group in chain}
        self.plan.place = {n: p for n, p in self.plan.place.items() if p[0] in chosen}
        self._arrange(self.plan.order)
        for chain in worth:
            self._batch(chain)
        nodes = list(self.run.program.graph.nodes)
        before = predecessors(self.run.program, nodes, self.free_draws)
        self._arrange(nearest_order(before, self.rank))

    def _arrange(self, order: Sequence[Node]) -> None:
        *others, output = order
        for node in others:
            self.run.rewriter.move_before(node, output)

    def _batch(self, chain: Sequence[Group]) -> None:
        names = [_name(self.run, group) for group in chain]
        edits: list[Replacement] = []
        if not self.run.attempt(names[0], chain[0].nodes[0], lambda: self._replace(chain, names, edits)):
            return
        for edit, group, name in zip(edits, chain, names):
            self.run.fired(name)
            self.now.update(zip(edit.olds, (v.node for v in edit.new)))
            place = max(self.rank[n] for n in group.nodes)
            self.rank.update((n, place) for n in edit.op.made)

    def _replace(self, chain: Sequence[Group], names: Sequence[str], edits: list[Replacement]) -> None:
        rewriter, builder = self.run.rewriter, Builder(self.run.program, self.plan)
        batched = {node for group in chain for node in group.nodes}
        ops = [rewriter.emitter(group.nodes[0], name) for group, name in zip(chain, names)]
        singly = taken_out(self.plan, chain)
        try:
            for group, op in zip(chain, ops):
                group.members = [m.on(self.now) for m in group.members]
                builder.build(op, group)
                wanted = tuple(n for n in group.nodes if n in singly or any(u not in batched for u in n.users))
                made = builder.members(op, group, wanted)
                edits.append(Replacement(wanted, made, op, tuple(group.nodes), self.terms))
        except Exception:
            for op in reversed(ops):
                op.discard()
            raise
        rewriter.replace_all(edits)


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


def _write_in_between(*values: Any) -> Any:
    results = []
    for x, w in zip(values[:8], values[8:]):
        results.append(F.linear(x, w))
        values[8].add_(1)
    return results


def _members_returned(*values: Any) -> Any:
    results = [F.linear(x, w) for x, w in zip(values[:8], values[8:])]
    return [r.relu() for r in results], results[3]


X, W, B = ("f32[4, 16]",) * 8, ("f32[16, 16]",) * 8, ("f32[16]",) * 8
SIZES = (*("f32[4, 16]", "f32[8, 2]", "f32[2, 3, 5]") * 2, *("f32[3, 16]", "f32[1, 2]", "f32[7, 5]") * 2)
TORCH: dict[str, Any] = {"dialects": ["torch"]}
GroupBatchFusionPasses.examples = [
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
    fires(lambda *v: torch.cat([x.sigmoid() for x in v]), *X * 4, options={"group_batch_fusion_passes.min_group": 32}),
    fires(_of_any_sizes, *SIZES, options={"group_batch_fusion_passes.group_linear": True}, **TORCH),
    declines(_of_any_sizes, *SIZES, **TORCH),
    declines(lambda x, a, b, c: torch.cat([F.linear(x, w) for w in (a, b, c)]), X[0], *W[:3], **TORCH),
    declines(_one_after_the_other, X[0], *W, **TORCH),
    declines(lambda x, *w: sum(F.linear(p, v) for p, v in zip(x.chunk(8, -1), w)), "f32[4, 128]", *W, **TORCH),
    fires(lambda x, *w: sum(F.linear(p, v) for p, v in zip(x.chunk(8, -1), w)), "f32[4, 128]", *W,
          options={"remove_passes": "fuse_split_linear_add_pass"}, **TORCH),
    declines(_of_one_input, X[0], *[f"f32[{n}, 16]" for n in range(8)], *[f"f32[{n}]" for n in range(8)], **TORCH),
    declines(_write_in_between, *X, *W, because="would cost", **TORCH),
    declines(lambda x, *w: [F.linear(x, w[0]) for _ in range(8)], X[0], *W, **TORCH),
    declines(_linears(), *["f32[2048, 16]"] * 8, *W, because="would cost", **TORCH),
    declines(_each(lambda x: x.relu().sigmoid()), *["f32[512, 512]"] * 8, because="would cost"),
]
