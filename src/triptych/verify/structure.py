"""Structural checks of a graph: lint, recomputed facts, memory shared with the caller, dialect."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _private
from ..errors import VerificationError
from ..ir.effects import node_operands
from ..ir.facts import difference, fact, sizes_from_data
from ..ir.program import ATEN, Program
from ..ir.refusal import Refusal
from ..ir.text import lines


@dataclass(frozen=True)
class Contract:
    """What a graph promises its caller: recorded before a pass, compared after it."""

    inputs: int
    outputs: int
    dialect: str
    sharing: frozenset[tuple[str, str]]
    """Pairs of inputs and outputs that may share memory."""


def contract(gm: GraphModule) -> Contract:
    program = Program(gm)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    returned = [n for node in gm.graph.nodes if node.op == "output" for n in node_operands(node.args)]
    aliasing = program.aliasing
    ends = [(f"input {i}", n) for i, n in enumerate(inputs)] + [(f"output {i}", n) for i, n in enumerate(returned)]
    tensors = [(name, n) for name, n in ends if fact(n) is None or isinstance(fact(n), torch.Tensor)]
    sharing = {
        (a, b)
        for i, (a, left) in enumerate(tensors)
        for b, right in tensors[i + 1 :]
        if b.startswith("output") and aliasing.same(left, right)
    }
    return Contract(len(inputs), len(returned), program.dialect, frozenset(sharing))


def interface(graph: Graph) -> tuple[int, int]:
    """How many inputs a graph takes and how many values it returns. Raises VerificationError if it has no output node:
    torch's own `lint` accepts that, and the graph would return None."""
    outputs = graph.find_nodes(op="output")
    if len(outputs) != 1:
        raise VerificationError(f"the graph has {len(outputs) or 'no'} output node{'s' * (len(outputs) > 1)}")
    return len(graph.find_nodes(op="placeholder")), len(_private.pytree.tree_leaves(outputs[0].args))


def require_interface(graph: Graph, before: tuple[int, int]) -> None:
    """Raise VerificationError unless the caller of the graph can still call it as before."""
    now = interface(graph)
    if now != before:
        raise VerificationError(f"inputs and outputs were {before[0]} and {before[1]}, now {now[0]} and {now[1]}")


def verify(gm: GraphModule, before: Contract | None = None) -> None:
    """Raise VerificationError, with the lines around the fault, if the graph breaks an invariant."""
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise VerificationError(f"the graph is malformed: {error}") from error
    _check_facts(gm)
    if before is None:
        return
    now = contract(gm)
    if (now.inputs, now.outputs) != (before.inputs, before.outputs):
        raise VerificationError(
            f"inputs and outputs were {before.inputs} and {before.outputs}, now {now.inputs} and {now.outputs}"
        )
    if before.dialect == ATEN and now.dialect != ATEN:
        raise VerificationError("an ATen graph now calls functions that are not ATen operations")
    if extra := sorted(now.sharing - before.sharing):
        raise VerificationError("new sharing of memory: " + ", ".join(f"{a} with {b}" for a, b in extra))


def _check_facts(gm: GraphModule) -> None:
    """Every recorded fact must equal what the operation gives for the facts of its operands."""
    program = Program(gm)
    if program.fake_mode is None:
        return
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or fact(node) is None:
            continue
        if any(fact(n) is None for n in node.all_input_nodes) or not program.aliasing.effects(node).pure:
            continue
        problem = _recomputed_difference(program, node)
        if problem:
            raise VerificationError(f"{node.name}: {problem}\n{surroundings(node)}")


def _recomputed_difference(program: Program, node: Node) -> Refusal | None:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), fact)
    try:
        with program.computing(node):
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        return Refusal(f"cannot be computed: {type(error).__name__}: {error}")
    if sizes_from_data(value, [fact(n) for n in node.all_input_nodes]):
        return None
    return difference(fact(node), value, strides=False)


def surroundings(node: Node, around: int = 5) -> str:
    """The lines around a node, for an error message."""
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    listing = lines(node.graph)
    first = max(at - around, 0)
    around_it = enumerate(listing[first : at + around], first)
    return "\n".join(("-> " if i == at else "   ") + text for i, text in around_it)


