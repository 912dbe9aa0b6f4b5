"""Checks of the arguments of public functions, with errors that say what to give instead."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from .errors import TriptychError, UnknownName, in_one_line

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


def require_switches(function: str, **switches: Any) -> None:
    """Raise an error unless each of these parameters is True, False or None."""
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise TriptychError(f"{function} takes {name} as True or False, not {value!r}")


def require_tolerance(value: Any, function: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise TriptychError(f"{function} takes tolerance as a number that is not negative, not {value!r}")


def require_file(path: Any) -> Path:
    """The path of a file that can be written, as far as its name tells."""
    if not isinstance(path, (str, os.PathLike)):
        raise TriptychError(f"the path of a file is wanted, not {path!r}")
    file = Path(path)
    if not str(path) or file.is_dir():
        raise TriptychError(f"the path of a file is wanted, and {str(path)!r} is a folder")
    return file


def require_keywords(function: Callable[..., Any], model: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error for a keyword that the model does not take and that is near to a parameter of `function`, which
    was called with it, or of the model."""
    signature = _signature(model)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in kwargs.keys() - signature.parameters.keys():
        near = UnknownName("parameter", name, {*own, *signature.parameters}).near
        if near:
            meant = " or ".join(map(repr, near))
            neither = f"{name!r} is no parameter of {function.__name__}, nor of the model"
            raise TriptychError(f"{neither}; did you mean {meant}?")


@contextlib.contextmanager
def hint_to_unpack(model: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """If a call fails that got all inputs as one tuple or list, the error says how to give them."""
    try:
        yield
    except TriptychError:
        raise
    except Exception as error:
        if len(args) != 1 or not isinstance(args[0], (tuple, list)) or not _takes(model, args[0]):
            raise
        kind = type(args[0]).__name__
        hint = f"the model got one {kind}; if its inputs are in it, unpack it (model, *inputs)"
        raise TriptychError(f"{hint}. The call failed: {in_one_line(error)}") from error


def _takes(model: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    signature = _signature(model)
    if signature is None or not all(isinstance(one, (torch.Tensor, int, float)) for one in inputs):
        return False
    try:
        signature.bind(*inputs)
    except TypeError:
        return False
    return True


def _signature(model: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return None


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
