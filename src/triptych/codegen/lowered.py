"""Notes which graph Inductor lowers, and which of its nodes each call of a kernel computes.

The graph that a stage of passes leaves is not that graph: the passes before code generation follow, and some of
Inductor's own that lowering needs. Kernels are named by the nodes of the graph that is lowered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule, Node

from .. import _private
from ..ir.graph_copies import snapshot
from ..ir.text import EARLIER_RULE, RULE
from ..ir.work import WORK, is_launch
from ..passes.session import Session

NOTES = (RULE, EARLIER_RULE, WORK, "nn_module_stack", "fwd_nn_module_stack", "stack_trace")
"""What reports read from the meta of a launch, and Inductor drops where it writes the launch in another way."""


@contextlib.contextmanager
def lowering_noted(session: Session, graph: str, gm: GraphModule) -> Iterator[None]:
    """Of what is compiled inside, keep the graph that is lowered, and the nodes of each kernel."""
    launches = _launches(gm)
    with _private.nodes_of_kernels(session.kernel_nodes, graph):  # which holds a lock of the whole process
        run = _private.GraphLowering.run
        _private.GraphLowering.run = _noting(run, session, graph, launches)
        try:
            yield
        finally:
            _private.GraphLowering.run = run


def _noting(
    run: Callable[..., Any], session: Session, graph: str, launches: list[dict[str, Any]]
) -> Callable[..., Any]:
    @functools.wraps(run)
    def noted(lowering: Any, *args: Any, **kwargs: Any) -> Any:
        # graphs inside it are lowered by a subclass
        if type(lowering) is _private.GraphLowering and not getattr(lowering, "is_const_graph", False):
            copied = snapshot(lowering.module)
            _restore(copied, launches)
            session.lowered[graph] = copied
        return run(lowering, *args, **kwargs)

    return noted


def _launches(gm: GraphModule) -> list[dict[str, Any]]:
    """The meta of each launch of a Triton kernel that the graph has."""
    return [dict(node.meta) for node in _launching_nodes(gm)]


def _launching_nodes(gm: GraphModule) -> list[Node]:
    modules = [module for module in gm.modules() if isinstance(module, GraphModule)]
    return [node for module in modules for node in module.graph.nodes if is_launch(node)]


def _restore(lowered: GraphModule, launches: list[dict[str, Any]]) -> None:
    """Launches are in the order in which they were before."""
    nodes = _launching_nodes(lowered)
    if len(nodes) == len(launches):
        for node, meta in zip(nodes, launches):
            for key in NOTES:
                if key in meta:
                    node.meta.setdefault(key, meta[key])
