"""`remove_reshape_pass`: shortens chains of reshapes and permutes, and drops pairs that cancel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.facts import difference, fact, known_equal, storage, tensor_fact, tensor_of
from ..ir.program import Program
from ..ir.traits import is_pointwise
from ..match.pattern import Ints, Tensor
from ..pieces.plan import Step, build, plan
from ..pieces.read import SEEING, Way, only_used_by, way_of
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.refusal import NotConcerned, Refused
from ..rewrite.rule import Match, Rule
from ..rules.merge_views import MergePermutes, MergeReshapes, composed, keeps_order


class FewerViews(Rule):
    """a chain of reshapes, permutes and expands of x -> a shorter chain with the same result"""

    interior_may_be_used = True

    def pattern(self, op, x: Tensor, how):
        return op.any_of(op.reshape(x, how), op.permute(x, how), op.squeeze(x, dim=how), op.unsqueeze(x, how))

    def check(self, m, x):
        way, steps = _shortened(m)
        dead = only_used_by(way.nodes[1:], m.root.node)
        m.applies(len(steps) <= len(dead), "the chain cannot be shortened")
        m.cover(way.nodes)

    def rewrite(self, op, m, x):
        way, steps = _shortened(m)
        view = build(op, m.program.value(way.source), steps)
        copies = storage(view.fact) != storage(fact(way.source))
        m.require(not copies or storage(m.root.fact) != storage(fact(way.source)), "the new chain would have to copy x")
        if restrided := difference(m.root.fact, view.fact):  # a view after it might have to copy
            raise Refused(restrided.blaming(m.root.node))
        return view

    examples = [
        fires(lambda x: x.unsqueeze(0).transpose(1, 2).squeeze(0).t() + 1, "f32[4, 8]"),
        fires(lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1).unflatten(1, (4, 2)).mT.flatten(1) + 1,
              "f32[4, 8]"),
        fires(lambda x: x.t().unsqueeze(1).transpose(0, 2).squeeze(1) + 1, "f32[4, 8]", dynamic=True),
        fires(lambda x: x.permute(2, 0, 1)[None].permute(0, 2, 3, 1).squeeze(0) + 1, "f32[2, 3, 4]"),
        declines(lambda x: x.view(4, 2, 4).transpose(1, 2).reshape(4, 8) + 1, "f32[4, 8]"),
        declines(lambda x: (lambda y: (y, y.transpose(0, 1).flatten(1)))(x.view(4, 2, 4)), "f32[4, 8]"),
        declines(lambda x: x.view(4, 2, 4).transpose(0, 1).reshape(8, 4).view(2, 4, 4).permute(1, 0, 2) + 1,
                 "f32[4, 8]", dialects=("torch",), because="stride"),
        declines(lambda x: _write_between(x), "f32[4, 8]", dialects=("torch",), because="in between"),
    ]  # fmt: skip


def _shortened(m: Match) -> tuple[Way, list[Step]]:
    """The chain of views that ends at the root, and the steps that have the same effect."""
    way = way_of(m.program, m.root.node, SEEING, SEEING)
    if way is None or len(way.nodes) < 3:
        raise NotConcerned("not a chain of views")
    steps = plan(way.map)
    if steps is None:
        raise NotConcerned("the chain cannot be shortened")
    return way, steps


def _write_between(x: Any) -> Any:
    """For examples: the first of the views is a copy, made before the write."""
    copy = x.t().reshape(-1)
    x.add_(1)
    return copy.view(2, 4, 4).transpose(0, 1).reshape(4, 8) + 1


@dataclass
class Cone:
    """The pointwise operations from which a value is computed, and the views that are their inputs."""

    inside: dict[Node, None]
    sources: dict[Node, Node]
    """The views, each with its operand."""


LARGEST_CONE = 32
"""Search budget: operations followed from one value. Keeps the pass linear."""


def cone_above(program: Program, top: Node, root: Node, peel: Callable[[Node], Node | None]) -> Cone:
    """Follow `top` up through pointwise operations of its shape. `peel` returns the operand of a view at which the cone
    ends, and None for any other node."""
    cone = Cone({top: None}, {})
    shape = getattr(tensor_fact(top), "shape", None)
    if shape is None or not len(shape):
        raise NotConcerned("nothing to reshape")
    work = [top]
    while work:
        node = work.pop()
        if not _is_plain_pointwise(program, node):
            _stop(cone, node, "is not pointwise")
        for operand in node.all_input_nodes:
            value = tensor_fact(operand)
            if operand in cone.inside or operand in cone.sources or (value is not None and value.dim() == 0):
                continue
            if value is None or not known_equal(value.shape, shape):
                _stop(cone, operand, "has another shape")
            if (source := peel(operand)) is not None:
                cone.sources[operand] = source
            else:
                cone.inside[operand] = None
                work.append(operand)
        if len(cone.inside) > LARGEST_CONE:
            raise NotConcerned(f"more than {LARGEST_CONE} operations")
    if not cone.sources:
        raise NotConcerned("no view above")
    for node in cone.inside:
        if outside := next((u for u in node.users if u not in cone.inside and u is not root), None):
            raise Refused("{at} is used by {found} too", at=node, found=outside)
    return cone


def _stop(cone: Cone, node: Node, why: str) -> None:
    """Raise Refused, with the reason, if the cone has reached a view already; else NotConcerned, since this is no
    site."""
    raise (Refused if cone.sources else NotConcerned)(f"{{at}} {why}", at=node)


def _is_plain_pointwise(program: Program, node: Node) -> bool:
    call = program.call(node)
    return (
        call is not None
        and is_pointwise(call.op)
        and not call.mutates
        and "memory_format" not in call.args
        and tensor_fact(node) is not None
        and program.aliasing.effects(node).pure
    )


class AcrossPointwise(Rule, ABC):
    """g(f(h(x))) -> f(x), where f is pointwise and the views h and g undo each other."""

    @abstractmethod
    def peel(self, m: Match, node: Node) -> Node | None:
        """The operand of the view `node`, if the root undoes that view."""

    def check(self, m, y):
        m.applies(m.root.known)
        cone = cone_above(m.program, y.node, m.root.node, lambda node: self.peel(m, node))
        m.cover((*cone.inside, *cone.sources))

    def rewrite(self, op, m, y):
        cone = cone_above(m.program, y.node, m.root.node, lambda node: self.peel(m, node))
        operands = dict(cone.sources)
        for node in sorted(cone.inside):
            twin = op.again(node, operands)
            # a zero-dim tensor is promoted like a number
            dtype = tensor_of(node).dtype
            m.require(twin.dtype == dtype, "{at} would be computed in {found}", at=node, wanted=dtype, found=twin.dtype)
            operands[node] = twin.node
        return operands[y.node]


class ReshapeAcrossPointwise(AcrossPointwise):
    """reshape(f(reshape(x, s)), shape of x) -> f(x), for pointwise f; squeeze and unsqueeze likewise"""

    def pattern(self, op, y: Tensor, how):
        return op.any_of(op.reshape(y, how), op.squeeze(y, dim=how), op.unsqueeze(y, how))

    def peel(self, m, node):
        call = m.program.call(node)
        source = call.args["self"] if call is not None and keeps_order(call) else None
        value = tensor_fact(source)
        return source if value is not None and known_equal(value.shape, m.root.shape) else None

    examples = [
        fires(lambda x: x.view(-1).relu().view(4, 8), "f32[4, 8]"),
        fires(lambda x: (x.reshape(2, 16).neg().abs() * 2.0 + 1).reshape(4, 8), "f32[4, 8]"),
        fires(lambda x, y: (x.view(-1) + y.view(-1)).view(4, 8), "f32[4, 8]", "f32[4, 8]"),
        fires(lambda x: x.unsqueeze(1).relu().squeeze(1), "f32[4, 8]"),
        fires(lambda x, s: (x.view(-1) * s).view(4, 8), "f32[4, 8]", "f32[]"),
        fires(lambda x: x.view(-1).relu().view(x.shape), "f32[4, 8]", dynamic=True),
        fires(lambda x: x.view(-1).to(torch.float16).view(4, 8), "f32[4, 8]"),
        declines(lambda x, y: (x.view(-1) + y).view(4, 8), "f32[4, 8]", "f32[32]", because="not pointwise"),
        declines(lambda x, y: (x.view(2, 16) + y).view(4, 8), "f32[4, 8]", "f32[16]", because="another shape"),
        declines(lambda x: (y := x.view(-1).relu(), y.view(4, 8)), "f32[4, 8]", because="used by output"),
        declines(lambda x, s: (x.view(1) * s + s).to(torch.float64).view(()), "f32[]", "f64[]",
                 because="computed in"),
        declines(lambda x: x.view(-1).cumsum(0).view(4, 8), "f32[4, 8]"),
        declines(lambda x: x.view(-1).relu().view(8, 4), "f32[4, 8]"),
        declines(lambda x: torch.dropout(x.view(-1), 0.5, True).view(4, 8), "f32[4, 8]", dialects=("torch",)),
        declines(lambda x: x.t().reshape(-1).relu().reshape(4, 4), "f32[4, 4]", because="stride",
                 dialects=("torch",)),
        declines(lambda x: (y := x.view(-1), z := y * 2, x.add_(1), z.view(4, 8) + 1)[-1], "f32[4, 8]",
                 because="writes", dialects=("torch",)),
    ]  # fmt: skip


class PermuteAcrossPointwise(AcrossPointwise):
    """permute(f(permute(x, a)), inverse of a) -> f(x), for pointwise f"""

    def pattern(self, op, y: Tensor, b: Ints):
        return op.permute(y, b)

    def peel(self, m, node):
        call = m.program.call(node)
        if call is None or call.op != "permute" or len(call.args["dims"]) != len(m["b"]):
            return None
        dims = composed(call.args["dims"], m["b"])
        return call.args["self"] if dims == sorted(dims) and dims[0] == 0 else None

    examples = [
        fires(lambda x: x.t().relu().t(), "f32[4, 8]"),
        fires(lambda x: (x.permute(1, 2, 0) * 2 + 1).sigmoid().permute(2, 0, 1), "f32[4, 8, 2]"),
        fires(lambda x, y: torch.maximum(x.mT, y.mT).mT, "f32[4, 8]", "f32[4, 8]"),
        fires(lambda x: x.t().relu().t(), "f32[4, 8]", dynamic=True),
        declines(lambda x: x.permute(1, 2, 0).relu().permute(1, 2, 0), "f32[4, 8, 2]"),
        declines(lambda x, b: (x.t() + b).t(), "f32[4, 8]", "f32[4]", because="another shape"),
        declines(lambda x, y: (x.t() + y).t(), "f32[4, 8]", "f32[8, 4]", because="not pointwise"),
        declines(lambda x: x.t().contiguous().relu().t(), "f32[4, 8]"),
    ]


@dataclass(frozen=True)
class RemoveReshapePass(Pass):
    """Shortens chains of reshapes and permutes, and drops those that cancel, also across pointwise operations."""

    name = "remove_reshape_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES


RULES: list[Rule] = [MergeReshapes(), MergePermutes(), FewerViews(), ReshapeAcrossPointwise(), PermuteAcrossPointwise()]
