"""Checks of the arguments of public functions, with errors that say what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from .errors import TriptychError

OF_A_MODEL = (
    "torch.compile(model, backend='triptych') captures it and goes through all stages; "
    "torch.fx.symbolic_trace(model) or torch.export.export(model, args).module() is a graph of it"
)


def require_graph(value: Any, function: str, of_a_model: str = OF_A_MODEL) -> None:
    """Raise an error unless `value` is a captured graph; `function` is the one that was called, `of_a_model` says what
    to call for a model."""
    if not isinstance(value, GraphModule):
        wanted = "a captured graph (a torch.fx.GraphModule)"
        raise TriptychError(f"{function} takes {wanted}, not {what(value)}{_graph_hint(value, of_a_model)}")


def _graph_hint(value: Any, of_a_model: str) -> str:
    if isinstance(value, ExportedProgram):
        return ": triptych.optimize takes one, and exported_program.graph_module is its graph"
    if isinstance(value, Graph):
        return ": torch.fx.GraphModule(module, graph) has it with its parameters"
    if _is_module_class(value):
        return _instance_hint(value)
    if isinstance(value, nn.Module) or callable(value):
        return f": {of_a_model}"
    return ""


def require_model(value: Any, function: str) -> None:
    """Raise an error unless `value` is a module or a function that can be compiled and called."""
    if isinstance(value, (type, ExportedProgram)) or not callable(value):
        raise TriptychError(f"{function} takes a module or a function to call, not {what(value)}{_model_hint(value)}")


def _model_hint(value: Any) -> str:
    if isinstance(value, ExportedProgram):
        return ": exported_program.module() can be called"
    if isinstance(value, Graph):
        return ": torch.fx.GraphModule(module, graph) can be called"
    return _instance_hint(value) if isinstance(value, type) else ""


def require_exported_program(value: Any, function: str) -> None:
    if not isinstance(value, ExportedProgram):
        hint = _instance_hint(value) if isinstance(value, type) else ""
        if isinstance(value, nn.Module):
            hint = ": torch.export.export(model, args) makes one"
        raise TriptychError(f"{function} takes a torch.export.ExportedProgram, not {what(value)}{hint}")


def require_sequence(value: Any, function: str) -> None:
    if isinstance(value, (torch.Tensor, str, Mapping)) or not isinstance(value, Sequence):
        raise TriptychError(f"{function} takes the inputs as a list or tuple, not as {what(value)}")


def require_inputs(value: Any, gm: GraphModule, function: str) -> None:
    """Raise an error unless `value` is a list of as many inputs as the graph takes."""
    require_sequence(value, function)
    if type(gm.graph._codegen) is not CodeGen:
        return  # nested values, which the graph's own code flattens
    inputs = gm.graph.find_nodes(op="placeholder")
    required = [node for node in inputs if not node.args]  # one with an argument has a default
    if not len(required) <= len(value) <= len(inputs):
        raise TriptychError(f"{function} got {len(value)} inputs for a graph of {len(inputs)}")


def require_callable(value: Any, function: str, wanted: str) -> Callable[..., Any]:
    if isinstance(value, ExportedProgram) or not callable(value):
        raise TriptychError(f"{function} takes {wanted}, not {what(value)}")
    return value


def what(value: Any) -> str:
    """A value of the wrong type, as errors name it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if isinstance(value, nn.Module):
        return f"the module {name}"
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _instance_hint(cls: type) -> str:
    return f": give an instance, {cls.__name__}(...)"
