"""A forward graph and its backward graph, after the partitioner has split a joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .facts import known, known_equal

BACKWARD = "triptych_backward"
"""Meta key of a forward module: its backward, while passes look at both."""

RESULTS = "triptych_results"
"""Meta key of the output node of a forward graph: how many of its values are returned to the program. The values after
them are saved for the backward."""

GRADIENTS = "triptych_gradients"
"""Meta key of the output node of a backward graph: the strides of the tensors that its values are the gradients of."""


def mark_gradients(backward: Graph, given: Sequence[Any]) -> None:
    """Record the strides of the program's inputs, `given`: the backward graph returns a gradient for each, in order."""
    output = backward.output_node()
    if len(given) == len(output.args[0]):  # type: ignore[arg-type]
        output.meta[GRADIENTS] = [tuple(x.stride()) if isinstance(x, torch.Tensor) else None for x in given]


def returns_gradients(graph: Graph) -> bool:
    return GRADIENTS in graph.output_node().meta


def is_gradient_that_fits(node: Node, tensor: Any) -> bool:
    """Would `tensor`, returned in place of `node`, be a gradient with the strides of the tensor that it is the gradient
    of? Autograd accepts gradients with other strides, but copies them."""
    if not returns_gradients(node.graph) or not isinstance(tensor, torch.Tensor):
        return False
    output = node.graph.output_node()
    returned: Any = output.args[0]
    wanted = output.meta[GRADIENTS]
    if len(wanted) != len(returned):
        return False
    return all(_lies(tensor, strides) for value, strides in zip(returned, wanted) if value is node)


def _lies(tensor: torch.Tensor, strides: tuple[Any, ...] | None) -> bool:
    if strides is None or len(strides) != tensor.dim():
        return False
    return all(known(n == 1) or known_equal(a, b) for n, a, b in zip(tensor.shape, tensor.stride(), strides))


@dataclass
class Backward:
    """The backward of a forward graph."""

    gm: GraphModule
    results: int
    """How many values the forward returns to the program; the values after them are saved for the backward."""

    @property
    def inputs(self) -> dict[str, Node]:
        """The inputs of the backward by name; a value that the forward saves has the same name in both graphs."""
        return {n.name: n for n in self.gm.graph.nodes if n.op == "placeholder"}


def backward_of(forward: GraphModule) -> Backward | None:
    return forward.meta.get(BACKWARD)


def kept_values(forward: GraphModule, backward: Backward) -> list[Node]:
    """The values that the forward saves for the backward, except plain numbers."""
    returned: Any = forward.graph.output_node().args[0]
    return [n for n in returned[backward.results :] if isinstance(n, Node)]


def results(graph: Graph) -> list[Node]:
    """The values that a graph returns to the program: all but those that a forward saves for its backward."""
    output = graph.output_node()
    returned: Any = output.args[0]
    values = returned[: output.meta.get(RESULTS)] if isinstance(returned, (tuple, list)) else (returned,)
    return list(dict.fromkeys(node for node in values if isinstance(node, Node)))
