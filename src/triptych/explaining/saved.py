"""An explanation without the process that it came from: what a pickle of it holds.

Graphs refer to weights, fake tensors and functions that only this process has. Of each graph a pickle has the listing,
and what the report page and the summary compute from its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from ..ir.text import text
from ..options import HOOKS
from ..passes.session import Session


@dataclass(frozen=True)
class SavedGraph:
    """A graph of an explanation that was pickled."""

    text: str
    """One line a node."""
    labels: dict[str, str]
    """The names of its inputs as the user knows them."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<SavedGraph of {self.text.count(chr(10)) + 1} nodes: str() is its listing>"


def listing(graph: GraphModule | SavedGraph) -> str:
    return graph.text if isinstance(graph, SavedGraph) else text(graph)


def saved_session(session: Session) -> Session:
    """A copy that can be pickled: graphs as text, without weights and without the user's own passes."""
    from .labels import input_labels
    from .launches import SavedLaunches, launches

    labels = input_labels(session.graphs)

    def saved(name: str, graph: GraphModule | SavedGraph) -> SavedGraph:
        if isinstance(graph, SavedGraph):
            return graph
        return SavedGraph(text(graph), labels)

    graphs = {name: saved(name, graph) for name, graph in session.graphs.items()}
    no_hooks: dict[str, Any] = dict.fromkeys(HOOKS)
    options = replace(session.options, **no_hooks)
    lowered = {graph: SavedLaunches(tuple(launches(session, graph))) for graph in session.kernels}
    text_only: dict[str, Any] = {"graphs": graphs, "lowered": lowered, "runnable": {}}
    return replace(session, **text_only, origins=None, buffers=None, options=options)
