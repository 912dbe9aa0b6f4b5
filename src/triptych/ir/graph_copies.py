"""Copies of graphs: to look at later, or to go back to."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node

DYNAMO_SOURCE = "_dynamo_source"
"""Where an input came from in the user's code: AOTAutograd wants it on every input, and it is no meta."""


def copy_graph(gm: GraphModule) -> Graph:
    """The graph as it is now; the meta of its nodes is copied, what stands in it is shared."""
    graph = Graph(owning_module=gm)
    copied: dict[Node, Node] = {}
    result: Any = graph.graph_copy(gm.graph, copied)
    graph.output(result).meta = dict(gm.graph.output_node().meta)
    graph.set_codegen(gm.graph._codegen)
    for old, new in copied.items():
        new.meta = dict(old.meta)
        if (source := getattr(old, DYNAMO_SOURCE, None)) is not None:
            setattr(new, DYNAMO_SOURCE, source)
    return graph


class Backup:
    """The graphs of a module and of its sub-graphs as they are now, to go back to as often as needed."""

    def __init__(self, gm: GraphModule) -> None:
        self._graphs = [(m, copy_graph(m)) for m in gm.modules() if isinstance(m, GraphModule)]

    def restore(self) -> None:
        restored, self._graphs = self._graphs, []
        for module, graph in restored:
            module.graph = graph
            self._graphs.append((module, copy_graph(module)))


def snapshot(gm: GraphModule) -> GraphModule:
    """A copy whose graph, and whose sub-graphs, later passes do not reach; tensors and modules are shared."""
    copied = GraphModule(gm, copy_graph(gm))
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(copied, name):
            setattr(copied, name, snapshot(child))
    return copied
