"""Copies of graphs, to inspect later or to restore."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

DYNAMO_SOURCE = "_dynamo_source"
"""Where an input came from in the user's code. AOTAutograd needs it on every input; it is an attribute of the node, not
an entry of its meta."""


class Backup:
    """The current graphs of a module and of its sub-graphs, which can be restored any number of times."""

    def __init__(self, gm: GraphModule) -> None:
        self._graphs = [(m, GraphState(m)) for m in gm.modules() if isinstance(m, GraphModule)]

    def restore(self) -> None:
        for module, state in self._graphs:
            module.graph = state.graph()


class GraphState:
    """A record of the nodes of a graph. A new graph is built from it only on demand, which is rare.

    Arguments are stored as they are, with the nodes of the old graph in them: torch.fx never mutates the arguments of a
    node, it assigns new ones.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.codegen = gm.graph._codegen
        self.nodes = [
            (n, (n.op, n.target, n.args, n.kwargs, n.name, n.type), dict(n.meta), getattr(n, DYNAMO_SOURCE, None))
            for n in gm.graph.nodes
        ]

    def graph(self) -> Graph:
        """A new graph equal to the recorded one; the values in the meta of its nodes are shared."""
        graph = Graph(owning_module=self.gm)
        copies: dict[Node, Node] = {}
        for old, (op, target, args, kwargs, name, kind), meta, source in self.nodes:
            args, kwargs = map_arg(args, copies.__getitem__), map_arg(kwargs, copies.__getitem__)
            copies[old] = new = graph.create_node(op, target, args, kwargs, name, kind)
            new.name = name  # torch.fx appends a number to the name of a builtin, such as `input`
            new.meta = dict(meta)
            if source is not None:
                setattr(new, DYNAMO_SOURCE, source)
        graph.set_codegen(self.codegen)
        return graph


def copy_graph(gm: GraphModule) -> Graph:
    """A copy of the current graph; the meta of its nodes is copied, the values in it are shared."""
    return GraphState(gm).graph()


def snapshot(gm: GraphModule) -> GraphModule:
    """A copy whose graph and sub-graphs later passes do not change; tensors and modules are shared."""
    copied = GraphModule(gm, copy_graph(gm))
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(copied, name):
            setattr(copied, name, snapshot(child))
    return copied
