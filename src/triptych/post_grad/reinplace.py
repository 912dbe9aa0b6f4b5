"""`reinplace`: replaces copies of a tensor that change a part of it by in-place writes, where nobody can tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.effects import FUNCTIONALISED, node_operands
from ..ir.facts import fact
from ..ir.inlined_reads import VIEW_OF_SCATTER
from ..ir.memory_places import Place, place
from ..ir.overwriting import COPY, LaterUses, Operands, Overwrite, overwrite
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..rewrite.edits import WriteInPlace
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule
from .reinplace_calls import ReinplaceCustomOperators, ReinplaceTritonKernels
from .reinplace_products import ReinplaceAddedProducts

aten = torch.ops.aten

INDEXED_WRITES: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_reduce.default: aten.index_reduce_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.copy.default: COPY,
}

NOT_IN_INDUCTOR = frozenset(
    (
        aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
        aten.index_reduce.default, aten.masked_scatter.default,
    )
)  # fmt: skip
"""Operators for whose in-place form Inductor has no kernel."""

FOREACH_IN_INDUCTOR = frozenset(
    f"aten::_foreach_{name}"
    for name in (
        "add_.List", "add_.Scalar", "mul_.List", "mul_.Scalar", "div_.List", "div_.Scalar", "addcmul_.Scalar",
        "addcdiv_.Scalar", "copy_",
    )
)  # fmt: skip
"""The in-place foreach operators for which Inductor has a kernel."""

ATEN: dict[str, Any] = {"dialects": ("aten",), "options": {"codegen": "eager"}}
KERNELS: dict[str, Any] = {"dialects": ("aten",)}
ROWS = torch.tensor([0, 2])


def _filled(value: Any, *parts: tuple[Any, float]) -> Any:
    for index, number in parts:
        value[index] = number
    return value


def _updated_cache(cache: Any, k: Any) -> Any:
    cache[:, 1:3] = k
    return cache.sum()


def _updated_beginning(cache: Any, k: Any) -> Any:
    cache.view(-1)[: k.numel()] = k.view(-1)
    return cache.sum()


def _updated_rows(cache: Any, k: Any, rows: Any) -> Any:
    cache.index_copy_(1, rows, k)
    return cache.sum()


def _old_value_too(cache: Any, k: Any, rows: Any) -> Any:
    return torch.index_copy(cache, 1, rows, k), cache * 2


def _added_to_itself(x: Any, rows: Any) -> Any:
    x.index_add_(0, rows, x[:2])
    return x.sum()


def _expanded(x: Any, rows: Any) -> Any:
    return torch.index_fill(x.relu().expand(4, 8), 0, rows, 1.0)


def _decayed(x: Any, y: Any) -> Any:
    aten._foreach_mul_.Scalar([x, y], 0.5)
    return x.sum() + y.sum()


def _crossed(x: Any, y: Any) -> Any:
    aten._foreach_add_.List([x, y], [y.flip(0), x.flip(0)])
    return x.sum() + y.sum()


class ReinplaceSliceAssignment(Rule):
    """y = slice_scatter(x, v, ...) -> copy_(slice(x, ...), v), y is x

    Valid if nothing reads x or an alias of it afterwards, no two elements of x share an address, v shares no memory
    with x, and x is not an input, unless the graph ends by copying y into x: see `ir.overwriting`. `cache[:, i] = k`
    then writes its slice and not the whole cache. `select_scatter` and `diagonal_scatter` are treated in the same way.

    Inductor can compute such an assignment in the kernel that computes x. With Inductor, the rule therefore declines
    unless x is in memory anyway.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if not _calls_any(program, VIEW_OF_SCATTER):
            return
        later = LaterUses(program)
        for node in later.walk():
            if node.target not in VIEW_OF_SCATTER or not node.users or len(node.args) < 2:
                continue
            destination: Any = node.args[0]
            source: Any = node.args[1]
            if later.inductor and not _in_memory(later, node, destination):
                problem = Refusal("Inductor computes the assignment together with {at}", at=destination)
                yield Match.at(program, node, problem=problem)
                continue
            operands = Operands(program, [destination], [source], written=written_part(program, node, destination))
            yield _site(program, node, overwrite(later, node, destination, operands))

    def rewrite(self, op, m):
        node, plan = m.root.node, m.bindings["plan"]
        part = op.call(VIEW_OF_SCATTER[node.target], plan.destination, *node.args[2:], **node.kwargs)
        with m.program.without_guards():  # the scatter has the same sizes, and torch has looked at them
            op.call(COPY, part, node.args[1])
        return _written(node, [plan])

    examples = [
        fires(_updated_cache, "f32[2, 4, 8]", "f32[2, 2, 8]", **ATEN),
        fires(_updated_cache, "f32[2, 4, 8]", "f32[2, 2, 8]", **KERNELS),
        fires(_updated_cache, "f32[2, 4, 8]", "f32[2, 2, 8]", **ATEN, dynamic=True),
        fires(_updated_beginning, "f32[2, 4, 8]", "f32[2, 8]", **ATEN),
        fires(lambda x: _filled(x.relu(), (0, 1.0), (1, 2.0)), "f32[4, 8]", **ATEN),
        declines(
            lambda x: _filled(x.relu(), (0, 1.0)), "f32[4, 8]", because="computes the assignment together", **KERNELS
        ),
        declines(lambda x: torch.select_scatter(x, x[0], 0, 1), "f32[4, 8]", because="may share memory", **ATEN),
        declines(lambda x: torch.select_scatter(x, x[0] + 1, 0, 1), "f32[4, 8]", because="is an input", **ATEN),
        declines(
            lambda x: (lambda y: (torch.select_scatter(y, x[0], 0, 1), y))(x.relu()),
            "f32[4, 8]", because="is used afterwards", **ATEN,
        ),
        fires(lambda x, v: torch.diagonal_scatter(x.sin(), v), "c64[4, 4]", "c64[4]", **ATEN),
        declines(
            lambda x, v: torch.diagonal_scatter(x.sin(), v), "c64[4, 4]", "c64[4]", because="is complex", **KERNELS
        ),
    ]  # fmt: skip


class ReinplaceIndexedWrites(Rule):
    """y = index_put(x, i, v) -> index_put_(x, i, v), y is x

    Valid if nothing reads x or an alias of it afterwards, no two elements of x share an address, neither i nor v shares
    memory with x, and x is not an input, unless the graph ends by copying y into x: see `ir.overwriting`. Scatters,
    `index_add`, `index_copy`, `index_fill`, `masked_scatter` and `copy` are treated in the same way.

    Inductor computes i and v inside the kernel that writes. With Inductor, the rule therefore declines if one of them
    is computed from x by operations that would be fused into this kernel.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if not _calls_any(program, INDEXED_WRITES):
            return
        later = LaterUses(program)
        for node in later.walk():
            if node.target not in INDEXED_WRITES or not node.users or not node.args:
                continue
            if later.inductor and node.target in NOT_IN_INDUCTOR:
                continue
            is_copy = node.target is aten.copy.default
            others = node_operands((node.args[1:], node.kwargs))
            written = place(program, node.args[0]) if is_copy and isinstance(node.args[0], Node) else None
            operands = Operands(program, node.args[:1], others, written=written)
            plan = overwrite(later, node, node.args[0], operands)
            if later.inductor and is_copy and isinstance(plan, Overwrite) and plan.copy_back is None:
                plan = Refusal("Inductor computes the copy in the kernel that reads it")
            yield _site(program, node, plan)

    def rewrite(self, op, m):
        node, plan = m.root.node, m.bindings["plan"]
        target = INDEXED_WRITES[node.target]
        if node.target is aten._unsafe_index_put.default and m.program.options.codegen == "inductor":
            target = _private.generator_prims._unsafe_index_put_  # without a check of the bounds, as before
        op.call(target, plan.destination, *node.args[1:], **node.kwargs)
        return _written(node, [plan])

    examples = [
        fires(_updated_rows, "f32[2, 4, 8]", "f32[2, 2, 8]", ROWS, **ATEN),
        fires(_updated_rows, "f32[2, 4, 8]", "f32[2, 2, 8]", ROWS, **ATEN, dynamic=True),
        fires(lambda x, i, v: torch.index_put(x.relu(), [i], v), "f32[5, 8]", "i64[3]", "f32[3, 8]", **KERNELS),
        fires(lambda x, i, v: x.relu().scatter_add(0, i, v), "f32[5, 8]", "i64[3, 8]", "f32[3, 8]", **ATEN),
        declines(_old_value_too, "f32[2, 4, 8]", "f32[2, 2, 8]", ROWS, because="is used afterwards", **ATEN),
        declines(_added_to_itself, "f32[4, 8]", ROWS, because="may share memory", **ATEN),
        declines(_expanded, "f32[1, 8]", ROWS, because="may overlap", **ATEN),
        declines(
            lambda x, i: torch.index_put(y := x.relu(), [i], y[:3] * 2), "f32[5, 8]", "i64[3]",
            because="may compute it inside the write", **KERNELS,
        ),
    ]  # fmt: skip


class ReinplaceForeach(Rule):
    """ys = _foreach_add(xs, zs) -> _foreach_add_(xs, zs), each y is its x

    Valid where every x meets the conditions of `reinplace_indexed_writes`; either all are written in place or none.
    With Inductor, the rule applies only where every y is copied into its x, as an optimizer does: elsewhere Inductor
    computes the values in the kernels that read them.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if not any(_writes_list(n) for n in program.graph.nodes):
            return
        later = LaterUses(program)
        for node in later.walk():
            if (target := _writes_list(node)) is None:
                continue
            if later.inductor and target.name() not in FOREACH_IN_INDUCTOR:
                continue
            yield self._site(later, node, target)

    def _site(self, later: LaterUses, node: Node, target: Any) -> Match:
        destinations: Any = node.args[0]
        results = {u.args[1]: u for u in node.users}
        if len(results) != len(node.users) or any(u.args[0] is not node for u in node.users):
            return Match.at(later.program, node, problem="the results are used as a list")
        others = node_operands((node.args[1:], node.kwargs))
        operands = Operands(later.program, destinations, others)
        plans = []
        for i, destination in enumerate(destinations):
            plan = overwrite(later, results.get(i), destination, operands)
            if isinstance(plan, Refusal):
                return Match.at(later.program, node, problem=plan)
            if later.inductor and plan.copy_back is None:
                problem = Refusal("the result is not copied into {at}", at=destination)
                return Match.at(later.program, node, problem=problem)
            plans.append(plan)
        return Match.at(later.program, node, plans=plans, target=target)

    def rewrite(self, op, m):
        node = m.root.node
        op.call(m.bindings["target"], *node.args, **node.kwargs)
        return _written(node, m.bindings["plans"])

    examples = [
        fires(_decayed, "f32[4]", "f32[8]", **ATEN),
        fires(_decayed, "f32[4]", "f32[8]", **KERNELS),
        declines(_crossed, "f32[4]", "f32[4]", because="may share memory", **KERNELS),
        declines(lambda x, y: aten._foreach_mul.Scalar([x, y], 0.5), "f32[4]", "f32[8]", because="is an input", **ATEN),
    ]


def _calls_any(program: Program, targets: Any) -> bool:
    return any(n.target in targets for n in program.graph.nodes)


def _site(program: Program, node: Node, plan: Overwrite | Refusal) -> Match:
    if isinstance(plan, Refusal):
        return Match.at(program, node, problem=plan)
    return Match.at(program, node, plan=plan)


def _written(node: Node, plans: Sequence[Overwrite]) -> WriteInPlace:
    results = [(plan.value, plan.destination) for plan in plans if plan.value is not None]
    return WriteInPlace(node, results, [plan.copy_back for plan in plans if plan.copy_back is not None])


def written_part(program: Program, node: Node, destination: Node) -> Place | None:
    """The place that a scatter into a view writes."""
    there = place(program, destination)
    if there is None:
        return None
    view, rest = VIEW_OF_SCATTER[node.target], node.args[2:]  # type: ignore[index]
    numbers, named = torch.fx.map_arg((rest, dict(node.kwargs)), fact)
    with program.computing(node):
        part = view(there.tensor, *numbers, **named)
    return Place(there.base, part, there.start + part.storage_offset() - there.tensor.storage_offset())


def _in_memory(later: LaterUses, node: Node, destination: Node) -> bool:
    """Is the destination or the result in memory anyway, so that Inductor could not compute both in one kernel?"""
    aliasing = later.program.aliasing
    if node.target is aten.diagonal_scatter.default:
        return True  # Inductor writes it into a copy
    origin = destination
    while origin.target in VIEW_OF_SCATTER:  # skip earlier assignments
        origin = origin.args[0]  # type: ignore[assignment]
    if aliasing.is_input(origin):
        return origin is destination or aliasing.written(origin)
    return aliasing.written(node) or aliasing.written(origin) or _writes(origin)


def _writes(node: Node) -> bool:
    """Is the value computed by writing into memory: by an indexed write or by a functionalised call?"""
    source: Any = node.args[0] if node.args else None
    if isinstance(source, Node) and isinstance(source.target, _private.HigherOrderOperator):
        return source.target.name() in FUNCTIONALISED
    return node.target in INDEXED_WRITES


def _writes_list(node: Node) -> Any:
    """The in-place overload of a functional foreach operator; None if the node is anything else."""
    if not isinstance(node.target, _private.OpOverload) or not node.target.name().startswith("aten::_foreach_"):
        return None
    schema = node.target._schema
    in_place = getattr(aten, f"{schema.name.removeprefix('aten::')}_", None)
    is_functional = len(schema.returns) == 1 and not schema.is_mutable
    return getattr(in_place, node.target._overloadname, None) if is_functional else None


@dataclass(frozen=True)
class Reinplace(Pass):
    """Writes an operation's result into the memory of an operand that nobody reads afterwards."""

    name = "reinplace"

    def rules(self) -> Sequence[Rule]:
        return (
            ReinplaceSliceAssignment(),  # first: it turns a write of a view into a copy that the others can drop
            ReinplaceIndexedWrites(),
            ReinplaceForeach(),
            ReinplaceAddedProducts(),
            ReinplaceCustomOperators(),
            ReinplaceTritonKernels(),
        )
