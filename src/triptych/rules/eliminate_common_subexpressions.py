"""`eliminate_common_subexpressions`: what is computed twice from the same operands is computed once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.alias import Aliasing
from ..ir.facts import gives_symbols, symbols_would_merge
from ..ir.program import Program
from ..ir.refusal import Refusal
from ..ir.schema import argument_key
from ..rewrite.edits import Erase, ReadInstead, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

NAMESPACES = ("aten", "prims", "triptych")
"""Libraries whose operators do only what their schemas say; a user's operator may count its calls."""

PLAIN_FUNCTIONS = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
"""Functions that graphs call besides operators: elements of results, and arithmetic on sizes."""

CONSTRUCTORS = ("empty", "full", "zeros", "ones", "scalar_tensor", "arange", "iota", "new_")
"""Name prefixes of operators that create a tensor from numbers and read at most the size of an operand."""

ATEN: dict[str, Any] = {"dialects": ("aten",)}


class MergeEqualValues(Rule):
    """y = f(x), z = f(x) -> y = f(x), z is y

    The rule fires only if f has no side effects, nothing writes x between the two calls, and nothing writes y or z.

    It declines if both results are returned, because the caller may write one of them. It leaves operations such as
    `nonzero` alone, which introduce the symbol of a size that other values depend on, and declines equal operands of
    two such operations, because their symbols would become one. It leaves constructors such as `full` alone: a kernel
    generates their numbers where they are used, and two buffers can be written in place where one could not.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        first: dict[Any, Node] = {}
        for node in list(program.graph.nodes):
            if not _only_computes(program, node):
                continue
            key = (node.target, argument_key(node.args), argument_key(node.kwargs))
            earlier = first.setdefault(key, node)
            if earlier is node:
                continue
            problem = _problem(program, earlier, node)
            if problem is not None:
                first[key] = node  # the same problem would separate `earlier` from later nodes
            yield Match.at(program, node, earlier=earlier, problem=problem)

    def rewrite(self, op, m, earlier):
        later = m.root.node
        return Together([ReadInstead(later, earlier.node, tuple(later.users)), Erase([later])])

    examples = [
        fires(lambda x: x.exp().sum() + x.exp().amax(), "f32[4, 8]", **ATEN),
        fires(lambda x, w: (x @ w).relu() + (x @ w).sin(), "f32[4, 8]", "f32[8, 8]", **ATEN),
        fires(lambda x: (x.exp() + 1).sum(0) + (x.exp() + 1).sum(1), "f32[8, 8]", **ATEN),
        fires(lambda x: x.t().relu() + x.t().exp(), "f32[4, 8]", **ATEN),
        fires(lambda x: x.sum(0, keepdim=True).relu() + x.sum(0, keepdim=True), "f32[4, 8]", dynamic=True, **ATEN),
        fires(lambda x: x.max(0)[0] + x.max(0)[0].exp(), "f32[4, 8]", **ATEN),
        fires(lambda x: (x.sort()[0], x.sort()[1]), "f32[4, 8]", **ATEN),
        declines(lambda x: (x.exp(), x.exp()), "f32[4, 8]", because="both are returned", **ATEN),
        declines(lambda x: (x.exp(), x.exp().t()), "f32[4, 8]", because="both are returned", **ATEN),
        declines(lambda x: (x.sort()[0], x.sort()[0]), "f32[4, 8]", because="both are returned", **ATEN),
        declines(lambda x: torch.rand_like(x) + torch.rand_like(x), "f32[4, 8]", **ATEN),
        declines(lambda x: x + torch.ones(4) + torch.ones(4).exp(), "f32[4]", **ATEN),
        declines(lambda x: torch.zeros_like(x).cos() + torch.zeros_like(x).exp(), "f32[4]", **ATEN),
        declines(lambda x: x * 1.0 + x * True, "i64[4]", **ATEN),
        declines(lambda x: x / 0.0 + x / -0.0, "f32[4]", **ATEN),
    ]


def _only_computes(program: Program, node: Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes or gives_symbols(node):
        return False
    target = node.target
    is_known = _is_plain(target) if isinstance(target, _private.OpOverload) else target in PLAIN_FUNCTIONS
    return is_known and program.aliasing.effects(node).pure


@functools.cache
def _is_plain(target: _private.OpOverload) -> bool:
    """Is it an operator of torch's or ours, and not one that builds a tensor from numbers alone?"""
    return target.namespace in NAMESPACES and not target._schema.name.partition("::")[2].startswith(CONSTRUCTORS)


def _problem(program: Program, earlier: Node, later: Node) -> Refusal | None:
    aliasing = program.aliasing
    if (barrier := aliasing.barrier_between(earlier, later)) is not None:
        return Refusal("{at} stands between the two calls", at=barrier)
    if (problem := symbols_would_merge(later, earlier)) is not None:
        return problem
    effects = aliasing.effects(later)
    are_views = later.target is operator.getitem or (effects.aliases and not effects.may_copy)
    if are_views:  # views of the same memory, whatever its contents
        both_returned = all(any(u.op == "output" for u in n.users) for n in (earlier, later))
    else:
        if (writer := aliasing.first_writer(*_tensors(earlier), *_tensors(later))) is not None:
            return Refusal("{found} writes one of the two results", found=writer)
        if (writer := aliasing.written_between(later.all_input_nodes, earlier, later)) is not None:
            return Refusal("{found} writes an operand in between", found=writer)
        both_returned = bool(_returned(aliasing, earlier) & _returned(aliasing, later))
    return Refusal("both are returned, and {at} would be the same tensor", at=later) if both_returned else None


def _tensors(node: Node) -> list[Node]:
    """The value and, if it is a tuple, as the result of `sort` is, the `getitem` nodes of its elements."""
    return [node, *(user for user in node.users if user.target is operator.getitem and user.args[0] is node)]


def _returned(aliasing: Aliasing, node: Node) -> set[Any]:
    """The indices of the elements whose memory leaves the graph; None stands for the value itself."""
    return {None if n is node else n.args[1] for n in _tensors(node) if aliasing.is_output(n)}


@dataclass(frozen=True)
class EliminateCommonSubexpressions(Pass):
    """Computes once what is computed several times from the same operands."""

    name = "eliminate_common_subexpressions"

    def rules(self) -> Sequence[Rule]:
        return (MergeEqualValues(),)
