"""Can the calls run that a user's function has written? An error says so while the function is known by name: without
code generation, the graph would fail only at its first call."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _private
from ..errors import VerificationError
from ..ir.facts import fact, interchangeable
from ..ir.program import Program
from ..ir.text import line

Written = dict[str, tuple[Any, str, str]]
"""By the name of a node: what it calls, and with which arguments."""


def written(graph: Graph) -> Written:
    return {node.name: _call(node) for node in graph.nodes}


def require_runnable(program: Program, before: Written) -> None:
    """Compute the values of the calls that are not as they were before, and of those after them whose operands have
    become others; raise VerificationError for the first call that cannot run. Nothing in the graph changes."""
    values: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        return values[node] if node in values else fact(node)

    for node in program.graph.nodes:
        is_new = before.get(node.name) != _call(node)
        if node.op not in ("call_function", "call_method") or not (is_new or _reads(node, values)):
            continue
        is_known = node.name in before or any(isinstance(value(n), torch.Tensor) for n in node.all_input_nodes)
        # another call may switch a mode; and a write would change the fact of what it writes to
        computed = _computed(program, node, value) if is_known and not _writes(node) else None
        if is_new or not interchangeable(fact(node), computed):
            values[node] = computed


def _call(node: Node) -> tuple[Any, str, str]:
    return node.target, str(node.args), str(node.kwargs)  # names, not nodes: a copy of the graph has other nodes


def _reads(node: Node, values: dict[Node, Any]) -> bool:
    return any(operand in values for operand in node.all_input_nodes)


def _writes(node: Node) -> bool:
    if (schema := getattr(node.target, "_schema", None)) is not None:
        return bool(schema.is_mutable)
    if isinstance(node.target, _private.HigherOrderOperator):
        return True
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or name == "setitem" or "out" in node.kwargs


def _computed(program: Program, node: Node, value: Any) -> Any:
    """The value of a call; None where torch cannot compute it from shapes alone."""
    try:
        with program.without_guards():
            return program.compute(node, value)
    except _private.answered_by_graph_break:
        return None
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        # torch knows no shapes for the operator, or a size that depends on data was compared: no fault of the call
        if isinstance(error, NotImplementedError) or hasattr(error, "cond"):
            return None
        first = str(error).strip().partition("\n")[0]
        raise VerificationError(f"a call cannot run: {line(node)}: {first}") from error
