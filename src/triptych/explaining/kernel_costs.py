"""The estimated cost of each kernel launch: bytes read and written, and time."""

from __future__ import annotations

from collections.abc import Iterator

from ..cost.estimate import OperationCost, group_cost
from ..passes.session import Session
from .kernels import KernelCall, kernel_calls, kernels
from .saved import SavedGraph


def kernel_costs(session: Session, graph: str) -> Iterator[tuple[KernelCall, OperationCost]]:
    """The launches of one graph in order, each with its estimate from the nodes that it computes."""
    source = session.kernels[graph]
    gm = session.graphs.get(graph)
    if isinstance(gm, SavedGraph):
        yield from zip(kernel_calls(source, session.kernel_nodes.get(graph)), gm.kernel_costs, strict=True)
        return
    by_name = {node.name: node for node in gm.graph.nodes} if gm is not None else {}
    generated = {kernel.name for kernel in kernels(source)}
    calls = kernel_calls(source, session.kernel_nodes.get(graph))
    # a fused kernel also lists values that it only reads through views: do not count what a library computes twice
    of_libraries = {name for call in calls if call.name not in generated for name in call.nodes}
    for call in calls:
        own = [name for name in call.nodes if call.name not in generated or name not in of_libraries]
        nodes = [by_name[name] for name in own if name in by_name]
        yield call, group_cost(nodes, set(nodes))
