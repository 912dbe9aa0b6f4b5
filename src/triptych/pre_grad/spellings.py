"""For the passes that normalise: which way of writing a node is the canonical one, and whether it is certain
to mean the same."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch.fx import Node

from .. import _private
from ..ir.calls import OPERATORS, Call
from ..ir.effects import node_operands
from ..ir.facts import fact
from ..ir.program import ATEN, Program
from ..ir.schema import overloads, packet_tags
from ..ir.traits import is_pointwise
from ..rewrite.edits import Respell
from ..rewrite.refusal import Refused
from ..rewrite.rule import Match, Rule
from ..rewrite.spelling import Spelling, canonical_spelling

NO_SPELLING = frozenset("getitem setitem getattr tensor_getitem to_like".split())
"""Calls that are Python's own, or have no other form."""


def wanted_spelling(program: Program, node: Node) -> Spelling | None:
    """How the emitter would write what this node calls; None where there is nothing to choose."""
    call = program.call(node) if node.op != "call_module" else None
    if call is None or call.op in NO_SPELLING or not makes_tensors(node) or _is_chosen_overload(node):
        return None
    if "dynamic_output_shape" in packet_tags(call.op):
        return None  # computing it anew would make new symbols
    if call.mutates and not (hasattr(torch.Tensor, call.op) and writes_in_place(call)):
        return None
    wanted = canonical_spelling(program, node, call)
    if wanted is None or isinstance(wanted.target, _private.OpOverload):
        return None
    return wanted


def writes_in_place(call: Call) -> bool:
    """Does the call write elements in place and change nothing else? `squeeze_` and the like also change the shape of
    their operand."""
    return call.mutates and is_pointwise(call.op.removesuffix("_"))


def makes_tensors(node: Node) -> bool:
    """Is the result a tensor or several tensors, or not known?"""
    value = fact(node)
    results = value if isinstance(value, (list, tuple)) else (value,)
    return all(v is None or isinstance(v, torch.Tensor) for v in results)


def _is_chosen_overload(node: Node) -> bool:
    """Is this a direct call of an operator that is not a public ATen operator? Its author chose it on purpose, so it is
    not respelled."""
    if not isinstance(node.target, (_private.OpOverload, _private.OpOverloadPacket)):
        return False
    return not str(node.target).startswith("aten.") or str(node.target).startswith("aten._")


def require_certain(program: Program, node: Node, wanted: Spelling) -> None:
    """Raise Refused where the operands could be something for which the two spellings differ."""
    for operand in node_operands((node.args, node.kwargs)):
        value = fact(operand)
        if isinstance(value, torch.Tensor) and not _private.is_ordinary(value):
            raise Refused("{at} is not an ordinary tensor", at=operand)
    if fact(node) is None and not _certain_without_facts(node, program.call(node), wanted):
        raise Refused("shape and dtype are not known")


def _certain_without_facts(node: Node, call: Call | None, wanted: Spelling) -> bool:
    """Is the meaning of a call certain although its result is unknown? Torch's own functions bind their arguments by
    schema, whatever these are; a method or a Python operator may belong to an object that is no tensor."""
    if call is None or node.op != "call_function" or node.target in OPERATORS:
        return False
    if not inspect.isbuiltin(node.target) and node.target is not wanted.target:
        return False
    tensors = {p.name for s in overloads(call.op) for p in s.params if p.kind in ("tensor", "tensors")}
    return all(name in tensors for name, value in call.args.items() if any(node_operands(value)))


def torch_level_nodes(program: Program) -> Iterator[Node]:
    """The nodes of a torch-level graph, while it is rewritten; an ATen graph has one spelling already."""
    for node in list(program.graph.nodes) if program.dialect != ATEN else ():
        if not node._erased:
            yield node


class WrittenAs(Rule, ABC):
    """f(x) -> the same call in the spelling `wanted`, which the site brings along"""

    @abstractmethod
    def sites(self, program: Program) -> Iterator[Match]: ...

    def check(self, m, wanted):
        require_certain(m.program, m.root.node, wanted)

    def rewrite(self, op, m, wanted):
        return Respell(m.root.node, wanted)
