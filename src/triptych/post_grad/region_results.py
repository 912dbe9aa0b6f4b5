"""`region_results`: reads results of a region that share memory in a way that lets Inductor see the sharing."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..ir.effects import effects, node_operands
from ..ir.modules import attribute
from ..ir.program import Program
from ..rewrite.edits import EraseUnused, ReadInstead, ReturnCopy, Together
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

OPERANDS = 2
"""Where the operands begin among the arguments of `invoke_subgraph(body, name, *operands)`."""

X = torch.arange(4.0, requires_grad=True)
WHOLE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Views of all of the memory, in the same shape."""

PARTITIONED: dict[str, Any] = {"dialects": ("partitioned",)}


@torch.compiler.nested_compile_region
def _exponential(x: Any) -> Any:
    return x.exp()


@torch.compiler.nested_compile_region
def _square(x: Any) -> Any:
    return x * x


@torch.compiler.nested_compile_region
def _folded(x: Any) -> Any:
    return x.view(2, 2).exp().view(4)


@torch.compiler.nested_compile_region
def _double(x: Any) -> Any:
    return x * 2


class SharedRegionResult(Rule):
    """f(x)[1] -> f(x)[0] or x, or a view of it, where the graph f returns the same memory in both places

    In training, the forward of a region (`torch.compiler.nested_compile_region`) returns its results and what its
    backward needs, which are often views of these results or of its operands. Inductor assumes that every result of a
    region has separate memory, and may reuse the memory of one result while another one that shares it is still needed.
    If two results are different views of a value that f does not return itself, f returns a copy of one of them.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor":
            return
        for call in program.graph.find_nodes(op="call_function", target=_private.invoke_subgraph):
            body = attribute(program.gm, call.args[0].target)
            elements = {n.args[1]: n for n in call.users if n.target is operator.getitem}
            if not isinstance(body, GraphModule) or not elements:
                continue
            results = _results(body)
            behind = max(elements.values()).next
            for place, element in elements.items():
                source = _source(results, place)
                if source is not None and (source.operand or source.place in elements):
                    yield Match.at(program, element, before=behind, source=source, elements=elements, body=body)

    def rewrite(self, op, m):
        element: Any = m.root.node
        source: Source = m.bindings["source"]
        if source.views is None:
            return ReturnCopy(m.bindings["body"], element.args[1])
        if source.operand:
            value = element.args[0].args[OPERANDS + source.place]
        else:
            value = m.bindings["elements"][source.place]
        for view in source.views:
            value = op.call(view.target, value, *view.args[1:], **view.kwargs).node
        return Together([ReadInstead(element, value, list(element.users)), EraseUnused([element])])

    examples = [
        fires(lambda x: _exponential(x) + _exponential(x * 2), X, **PARTITIONED),
        fires(lambda x: _square(x) + _square(x * 2), X, **PARTITIONED),
        fires(lambda x: _folded(x) + _folded(x * 2), X, **PARTITIONED),
        declines(lambda x: _double(x) + _double(x + 1), X, **PARTITIONED),
        declines(lambda x: _square(x) + _square(x * 2), X, **PARTITIONED, options={"codegen": "eager"}),
    ]


@dataclass(frozen=True)
class Source:
    """Where the memory of a result of a region comes from."""

    place: int
    """Position of the operand, or of the other result."""
    operand: bool
    views: list[Node] | None
    """The view calls in the region that compute the result from it; None if both are views of some other value."""


def _source(results: Sequence[Any], place: int) -> Source | None:
    """The operand or other result whose memory the result at `place` shares.

    None if it shares no memory, or if the results that share it are to be read from this one.
    """
    memory, views = _memory(results[place])
    if memory is None:
        return None
    if memory.op == "placeholder":
        operands = memory.graph.find_nodes(op="placeholder")
        return Source(operands.index(memory), True, views)
    others = [i for i, result in enumerate(results) if i != place and _memory(result)[0] is memory]
    whole = [i for i in sorted([*others, place]) if all(v.target in WHOLE for v in _memory(results[i])[1])]
    if whole:
        return Source(whole[0], False, views) if whole[0] != place else None
    return Source(others[0], False, None) if others and others[0] < place else None


def _memory(value: Any) -> tuple[Node | None, list[Node]]:
    """The node whose memory a value is a view of, and the views in order."""
    views: list[Node] = []
    while isinstance(value, Node) and value.op == "call_function":
        aliases = list(effects(value).aliases)
        if not aliases:
            break
        if len(aliases) != 1 or value.args[0] is not aliases[0] or any(node_operands((value.args[1:], value.kwargs))):
            break
        views.append(value)
        value = aliases[0]
    return (value if isinstance(value, Node) else None), views[::-1]


def _results(body: GraphModule) -> Sequence[Any]:
    returned: Any = body.graph.output_node().args[0]
    return returned if isinstance(returned, (tuple, list)) else (returned,)


@dataclass(frozen=True)
class RegionResultsPass(Pass):
    """Reads a result of a region that shares memory with another result, or with an operand, from that one."""

    name = "region_results"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (SharedRegionResult(),)
