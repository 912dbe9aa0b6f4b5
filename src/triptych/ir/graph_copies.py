"""Copies of graphs: to look at later, or to go back to."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

DYNAMO_SOURCE = "_dynamo_source"
"""Where an input came from in the user's code: AOTAutograd wants it on every input, and it is no meta."""


class Backup:
    """The graphs of a module and of its sub-graphs as they are now, to go back to as often as needed."""

    def __init__(self, gm: GraphModule) -> None:
        self._graphs = [(m, GraphState(m)) for m in gm.modules() if isinstance(m, GraphModule)]

    def restore(self) -> None:
        for module, state in self._graphs:
            module.graph = state.graph()


class GraphState:
    """What a graph is made of, written down: a graph is made of it only when it is asked for, which is seldom.

    Arguments are kept as they are, with the nodes of the graph in them: torch.fx never changes the arguments that a
    node has, it gives the node others.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.codegen = gm.graph._codegen
        self.nodes = [
            (n, (n.op, n.target, n.args, n.kwargs, n.name, n.type), dict(n.meta), getattr(n, DYNAMO_SOURCE, None))
            for n in gm.graph.nodes
        ]

    def graph(self) -> Graph:
        """A new graph, as that of the module was; what stands in the meta of its nodes is shared."""
        graph = Graph(owning_module=self.gm)
        made: dict[Node, Node] = {}
        for old, (op, target, args, kwargs, name, kind), meta, source in self.nodes:
            args, kwargs = map_arg(args, made.__getitem__), map_arg(kwargs, made.__getitem__)
            made[old] = new = graph.create_node(op, target, args, kwargs, name, kind)
            new.name = name  # torch.fx appends a number to the name of a builtin, such as `input`
            new.meta = dict(meta)
            if source is not None:
                setattr(new, DYNAMO_SOURCE, source)
        graph.set_codegen(self.codegen)
        return graph


def copy_graph(gm: GraphModule) -> Graph:
    """The graph as it is now; the meta of its nodes is copied, what stands in it is shared."""
    return GraphState(gm).graph()


def snapshot(gm: GraphModule) -> GraphModule:
    """A copy whose graph, and whose sub-graphs, later passes do not reach; tensors and modules are shared."""
    copied = GraphModule(gm, copy_graph(gm))
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(copied, name):
            setattr(copied, name, snapshot(child))
    return copied
