"""Names of graph inputs as the user knows them: `blocks.0.attn.o.weight` instead of `primals_13`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch.fx import GraphModule, Node

from .. import _private
from ..ir.dynamo_guards import source_name
from ..ir.graph_copies import DYNAMO_SOURCE
from .saved import SavedGraph

STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.([A-Za-z]\w*)")


def input_labels(graphs: Mapping[str, GraphModule]) -> dict[str, str]:
    """Labels of the inputs of all graphs of one captured program, by node name."""
    labels: dict[str, str] = {}
    for graph in graphs.values():
        if isinstance(graph, SavedGraph):
            return graph.labels  # each has the labels of all graphs
    captured: list[Node] = []
    if "dynamo" in graphs:
        captured = _inputs(graphs["dynamo"])
        for node in captured:
            if label := label_of_source(node):
                labels[node.name] = label
    for name, gm in graphs.items():
        if name == "dynamo":
            continue
        for node in _inputs(gm):
            origin = node.meta.get("desc")
            if isinstance(origin, _private.PlainAOTInput) and origin.idx < len(captured):
                source = captured[origin.idx].name
                if source in labels:
                    labels[node.name] = labels[source]
            elif isinstance(origin, (_private.ParamAOTInput, _private.BufferAOTInput)):
                labels[node.name] = origin.target
    return labels


def label_of_source(node: Node) -> str:
    """What Dynamo's expression for an input means to the user: `L['self']._modules['up'].weight` is `up.weight`."""
    source = getattr(node, DYNAMO_SOURCE, None)
    if source is None:
        return ""
    expression = source_name(source)
    steps = [next(part for part in parts if part) for parts in STEP.findall(expression)]
    if not steps or not expression.startswith(("L[", "G[")):
        return ""
    # the first step is the local variable; for a parameter it is the module itself, which the label leaves out
    is_state = re.search(r"\._(?:modules|parameters|buffers)\[", expression) or len(steps) > 1
    return ".".join(steps[1:] if is_state else steps)


def _inputs(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]
