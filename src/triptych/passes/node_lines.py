"""The listing of a graph for a report: its text, one line per node, with the facts that the report shows."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from ..cost.estimate import OperationCost, operation_cost
from ..ir.text import call_text, join_line, rule_of, type_text


class NodeLine(str):
    """One line of a listing: a string, which also has the parts that it was written from."""

    __slots__ = ("name", "type", "call", "inputs", "stack_trace", "rule", "origin", "sequence", "cost")

    name: str
    type: str
    call: str
    inputs: tuple[str, ...]
    """Names of the nodes that it reads."""
    stack_trace: str
    """Where in the user's program it comes from, as torch formats it."""
    rule: str
    """The rule that created it in this or an earlier stage, or nothing."""
    origin: str
    """The node of the captured graph that AOTAutograd traced it for, or nothing."""
    sequence: int
    """Number of the autograd operation: a node of the backward has that of its forward; -1 if it is not known."""
    cost: OperationCost

    @staticmethod
    def of(node: Node, known: NodeLine | None = None) -> NodeLine:
        """The line of a node; its earlier line `known`, if that is still the same."""
        type_, call, meta = type_text(node), call_text(node), node.meta
        line = NodeLine(join_line(node, type_, call))
        if line == known:
            return known
        line.name, line.type, line.call = node.name, type_, call
        line.inputs = tuple(operand.name for operand in node.all_input_nodes)
        line.stack_trace = trace if isinstance(trace := meta.get("stack_trace"), str) else ""
        line.rule = rule_of(node)
        sources = meta.get("from_node")
        line.origin = str(sources[0].name) if sources else ""
        line.sequence = number if isinstance(number := meta.get("seq_nr"), int) else -1
        line.cost = operation_cost(node)
        return line


def node_lines(graph: Graph, before: Sequence[str] = ()) -> list[str]:
    """The listing of a graph; `before` is its listing before a pass, of which most lines can be reused."""
    known = {line.name: line for line in before if isinstance(line, NodeLine)}
    return [NodeLine.of(node, known.get(node.name)) for node in graph.nodes]
