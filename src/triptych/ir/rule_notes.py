"""Which rule wrote a node, also of a graph that AOTAutograd has traced from the one that the rule rewrote.

AOTAutograd creates all nodes anew. It notes in each of the forward which node it was traced from (`from_node`), and in
each of the backward the number of the autograd operation (`seq_nr`), which the forward's nodes have too.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule, Node

from .text import EARLIER_RULE, RULE

RulesByNode = dict[tuple[int, str], str]
"""The rules that wrote nodes, by the id of the graph and the name of the node."""


def rules_by_node(gm: GraphModule, rules: Collection[str]) -> RulesByNode:
    """Those of the rules that wrote nodes of the graph, or of the graphs inside it."""
    if not rules:
        return {}
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return {
        (id(graph), node.name): node.meta[RULE]
        for graph in graphs
        for node in graph.nodes
        if node.meta.get(RULE) in rules
    }


def note_earlier_rules(traced: GraphModule, rules: RulesByNode) -> None:
    """Name the rule in each node that AOTAutograd traced from a node that a rule wrote, or from its backward."""
    if not rules:
        return
    by_operation: dict[int, str] = {}
    for node in traced.graph.nodes:
        number, sources = node.meta.get("seq_nr"), node.meta.get("from_node")
        if sources:
            rule = rules.get((sources[0].graph_id, sources[0].name), "")
            if number is not None:
                # later nodes with the number of an operation are not differentiated by it
                by_operation.setdefault(number, rule)
        else:
            rule = by_operation.get(number, "") if is_of_backward(node) else ""
        if rule:
            node.meta[EARLIER_RULE] = rule


def is_of_backward(node: Node) -> bool:
    return bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"
