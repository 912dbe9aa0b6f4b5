"""A forward graph and its backward graph, after the partitioner has split a joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .facts import known, known_equal, numel, tensor_fact

BACKWARD = "triptych_backward"
"""Meta key of a forward module: its backward, while passes look at both."""

RESULTS = "triptych_results"
"""Meta key of the output node of a forward graph: how many of its values are returned to the program. The values after
them are saved for the backward."""

GRADIENTS = "triptych_gradients"
"""Meta key of the output node of a backward graph: the strides of the tensors that its values are the gradients of."""

REWRITTEN = "triptych_rewritten_before_autograd"
"""Meta key of the output node of a backward graph: was the program rewritten before autograd? Its gradients may then
have other strides than in eager."""


def mark_gradients(backward: Graph, given: Sequence[Any], rewritten: bool = False) -> None:
    """Record the strides of the program's inputs, `given`: the backward graph returns a gradient for each, in order.

    `rewritten`: the program was rewritten before autograd.
    """
    output = backward.output_node()
    if len(given) == len(output.args[0]):  # type: ignore[arg-type]
        output.meta[GRADIENTS] = [tuple(x.stride()) if isinstance(x, torch.Tensor) else None for x in given]
        output.meta[REWRITTEN] = rewritten


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


def gradients_with_new_strides(graph: Graph) -> list[Node]:
    """The gradients whose strides may be due to a rewrite before autograd: those that are neither contiguous nor have
    the strides of the tensors that they are the gradients of."""
    if not returns_gradients(graph) or not graph.output_node().meta[REWRITTEN]:
        return []
    returned: Any = graph.output_node().args[0]
    gradients = {node: tensor for node in returned if (tensor := tensor_fact(node)) is not None}
    return [
        node
        for node, tensor in gradients.items()
        if tensor.layout == torch.strided
        and not _lies(tensor, tuple(numel(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())))
        and not is_gradient_that_fits(node, tensor)
    ]


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
