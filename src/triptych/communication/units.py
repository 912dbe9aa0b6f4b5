"""The module that a collective works for: FSDP gathers and scatters the parameters of one such unit together."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch.fx import Graph, Node

from ..ir.collectives import Collective, collectives

STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Where AOTAutograd records the modules that a node was traced in, outermost first; a node of the backward has the
second key, for the modules of its forward."""


def unit_of(collective: Collective) -> str:
    """The path of the module: one of a list, such as `layers.3`, else the outermost; empty where nothing is known.

    If the collective itself has no such metadata, its operands and the readers of its result are asked.
    """
    readers = [user for wait in collective.waits for user in wait.users]
    return next((path for node in (collective.node, *collective.operands, *readers) if (path := _unit(node))), "")


def _unit(node: Node) -> str:
    for stack in STACKS:
        modules = node.meta.get(stack)
        if isinstance(modules, dict) and modules:
            paths = [str(module[0]) for module in modules.values() if isinstance(module, tuple) and module]
            in_list = next((match.group() for path in paths if (match := re.match(r".*?\.\d+(?=\.|$)", path))), None)
            outer = next((path for path in paths if path), "")
            return in_list or outer
    return ""


def in_modules(*paths: str) -> Callable[[Graph], None]:
    """A `prepare` function for examples: the collectives of a graph, in order, work for these modules."""

    def note(graph: Graph) -> None:
        for collective, path in zip(collectives(graph), paths):
            collective.node.meta[STACKS[0]] = {path: (path, None)}

    return note
