"""What a graph reads from its module: attributes, and called modules, which are read as operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .. import _private
from .facts import tensor_fact

_DROPOUTS: dict[type, str] = {
    nn.Dropout: "dropout", nn.Dropout1d: "feature_dropout", nn.Dropout2d: "feature_dropout",
    nn.Dropout3d: "feature_dropout", nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
}  # fmt: skip


def drops_dim_one(name: str, operand: Any) -> bool:
    """Does `dropout1d`, `dropout2d` or `dropout3d` drop whole slices along dim 1, as `feature_dropout` does?

    For an input without a batch dim, recognised by its rank, the slices are along dim 0. `dropout2d` treats three dims
    as batched.
    """
    known = tensor_fact(operand)
    return known is not None and known.dim() == {"1": 3, "2": known.dim(), "3": 5}.get(name[-2:-1])


def attribute(gm: nn.Module, path: Any) -> Any:
    """What a `get_attr` node reads: the attribute of a module by its dotted path."""
    owner, _, name = str(path).rpartition(".")
    return getattr(gm.get_submodule(owner), name)


def add_constant(gm: GraphModule, name: str, value: torch.Tensor) -> None:
    """Make a tensor that is known at compile time a buffer of the graph's module."""
    gm.register_buffer(name, value, persistent=False)
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:  # a graph from Dynamo: AOTAutograd needs the origin of every buffer
        sources[name] = _private.ConstantSource(name)


def called_module(node: Node) -> nn.Module | None:
    """The module a `call_module` node calls, if the graph knows its owner."""
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if isinstance(owner, GraphModule) else None


def module_call(node: Node) -> tuple[str, dict[str, Any]] | None:
    """The operation that a called module performs, with its arguments; None for a module that is not understood."""
    module = called_module(node)
    if module is None or len(node.args) != 1 or node.kwargs or _private.has_hooks(module):
        return None
    if type(module) is nn.Identity:
        return "identity", {"self": node.args[0]}
    name = _DROPOUTS.get(type(module))
    if name is None or not isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return None
    if module.inplace and module.training:
        return None
    if name == "feature_dropout" and module.training and not drops_dim_one(type(module).__name__, node.args[0]):
        return None
    return name, {"input": node.args[0], "p": module.p, "train": module.training}
