"""A user's function that returns another graph or module: its graph goes into the module that is compiled."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from .. import _private
from ..arguments import what
from ..errors import TriptychError
from ..ir.graph_copies import DYNAMO_SOURCE
from ..ir.modules import add_constant, attribute


def take_over(gm: GraphModule, returned: Any) -> None:
    """Give the module the graph that a function returned, with the attributes which that graph reads.

    A function that changed the graph in place returns nothing, the same graph or module, or whether or how often it
    changed something. Anything else is an error, and so is a count of changes where there are none.
    """
    module = returned.graph_module if isinstance(returned, PassResult) else returned
    if module is None or module is gm or module is gm.graph or isinstance(module, (bool, int)):
        return
    if not isinstance(module, (GraphModule, Graph)):
        raise WrongResult(
            f"returned {what(module)}: a function in a hook changes the graph in place and returns nothing, or returns "
            "another torch.fx.Graph or torch.fx.GraphModule"
        )
    graph = module if isinstance(module, Graph) else module.graph
    owner = module if isinstance(module, GraphModule) else graph.owning_module
    if owner is not None and owner is not gm:
        _take_attributes(gm, graph, owner)
    _take_notes(gm.graph, graph)
    gm.graph = graph


def require_plausible_count(returned: Any, is_changed: bool) -> None:
    """A number says how often a function changed the graph, as torch's own passes do; any other number is an error."""
    if isinstance(returned, int) and not isinstance(returned, bool) and returned and not is_changed:
        raise WrongResult(
            f"returned {returned}, and the graph is as it was: a function in a hook changes the graph in place and "
            "returns nothing or the number of its changes, or returns another torch.fx.Graph or torch.fx.GraphModule"
        )


class WrongResult(TriptychError):
    """A function in a hook that returned something of another type."""


def _take_notes(old: Graph, new: Graph) -> None:
    """What later steps want to know of inputs and outputs, and what a new tracing does not preserve."""
    for was, now in zip(old.find_nodes(op="placeholder"), new.find_nodes(op="placeholder")):
        now.meta = {**was.meta, **now.meta}
        if hasattr(was, DYNAMO_SOURCE) and not hasattr(now, DYNAMO_SOURCE):
            setattr(now, DYNAMO_SOURCE, getattr(was, DYNAMO_SOURCE))
    for was, now in zip(old.find_nodes(op="output"), new.find_nodes(op="output")):
        now.meta = {**was.meta, **now.meta}


def _take_attributes(gm: GraphModule, graph: Graph, owner: nn.Module) -> None:
    """Let the graph read the module of the compile; what this one does not have, or not the same, is added to it."""
    paths: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            path = str(node.target)
            if path not in paths:
                paths[path] = _path_in(gm, node, attribute(owner, path))
            node.target = paths[path]


def _path_in(gm: GraphModule, node: Node, value: Any) -> str:
    """The path under which the module has a value like this one."""
    path = str(node.target)
    try:
        known = attribute(gm, path)
    except AttributeError:
        pass
    else:
        if _same(known, value):
            return path
    flat = path.replace(".", "_")
    names = itertools.chain([flat], (f"{flat}_{number}" for number in itertools.count(1)))
    name = next(one for one in names if not hasattr(gm, one))
    if isinstance(value, torch.Tensor):
        add_constant(gm, name, value)
    else:
        setattr(gm, name, value)
    return name


def _same(one: Any, other: Any) -> bool:
    """Is the second the first, or an unchanged copy? Weights must stay those of the user."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if isinstance(one, _private.FakeTensor) or isinstance(other, _private.FakeTensor):
            return False
        layouts = [(t.shape, t.dtype, t.device, t.stride()) for t in (one, other)]
        return layouts[0] == layouts[1] and bool(torch.equal(one, other))
    if isinstance(one, GraphModule):
        return one.code == other.code and _same_state(one, other)
    return isinstance(one, nn.Module) and repr(one) == repr(other) and _same_state(one, other)


def _same_state(one: nn.Module, other: nn.Module) -> bool:
    mine, others = one.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    return mine.keys() == others.keys() and all(_same(value, others[name]) for name, value in mine.items())
