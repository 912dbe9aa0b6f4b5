"""A forward and its backward, once the partitioner has made them of a joint graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

BACKWARD = "triptych_backward"
"""Where the module of a forward graph has its backward, as long as passes look at both."""

RESULTS = "triptych_results"
"""Where the output of a forward graph says how many of its values the program gets; those after them are kept for the
backward."""


GRADIENTS = "triptych_gradients"
"""Where the output of a backward graph says that it is one."""


def returns_gradients(graph: Graph) -> bool:
    """Autograd takes a gradient with any strides: it copies one that does not lie as its tensor does."""
    return bool(graph.output_node().meta.get(GRADIENTS))


@dataclass
class Backward:
    """The backward of a forward graph."""

    gm: GraphModule
    results: int
    """How many values the forward returns to the program; what it returns after them is kept for the backward."""

    @property
    def inputs(self) -> dict[str, Node]:
        """What the backward takes, by name; a value that the forward keeps has the same name in both graphs."""
        return {n.name: n for n in self.gm.graph.nodes if n.op == "placeholder"}


def backward_of(forward: GraphModule) -> Backward | None:
    return forward.meta.get(BACKWARD)


def kept_values(forward: GraphModule, backward: Backward) -> list[Node]:
    """What the forward keeps for the backward; numbers aside."""
    returned: Any = forward.graph.output_node().args[0]
    return [n for n in returned[backward.results :] if isinstance(n, Node)]


def results(graph: Graph) -> list[Node]:
    """What a graph returns to the program: all values but those that a forward keeps for its backward."""
    output = graph.output_node()
    returned: Any = output.args[0]
    given = returned[: output.meta.get(RESULTS)] if isinstance(returned, (tuple, list)) else (returned,)
    return list(dict.fromkeys(node for node in given if isinstance(node, Node)))
