"""The ways a program is compiled.

- "compile": `torch.compile`, whole.
- "graph": the program as a graph of torch calls, handed to the backend without Dynamo.
- "stage": the same graph after stage 1 alone, run as it is: the cheapest, and where most rules are.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch.overrides import TorchFunctionMode

import triptych
from triptych.options import ON_ERROR_VARIABLE

from .program import Program

ROUTES = ("compile", "graph", "stage")
FACTORIES = {
    torch.tensor, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.linspace, torch.rand, torch.randn,
    torch.randint, torch.empty,
}  # fmt: skip


class Writing:
    """In-place writes to a proxy, recorded."""

    tracer: Any

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})


class WritingAttribute(Writing, fx.proxy.Attribute):
    """`x.mT`"""


class WritingProxy(Writing, fx.Proxy):
    def __getattr__(self, name: str) -> Any:
        return WritingAttribute(self, name)


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return WritingProxy(node, self)


class Factories(TorchFunctionMode):
    """Tensors made from numbers are part of the graph, not of the tracing."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES:
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    """The torch calls of a function; raises where it is not a plain list of them."""
    tracer = Tracer()
    with Factories(tracer):
        graph = tracer.trace(function)
    return fx.GraphModule(tracer.root, graph)


def options(codegen: str) -> dict[str, Any]:
    """Draws as in eager; an error in the compiler is raised, not worked around."""
    return {"codegen": codegen, "fallback_random": True, "on_error": "raise"}


def compiled(program: Program, function: Callable[..., Any], arguments: list[Any]) -> Callable[..., Any]:
    if program.route == "compile":
        dynamic = True if program.dynamic else None
        return torch.compile(function, backend=triptych.compile_fx, options=options(program.codegen), dynamic=dynamic)
    gm = graph_of(function)
    if program.route == "stage":
        os.environ[ON_ERROR_VARIABLE] = "raise"  # the stages as functions take no options
        return triptych.pre_grad_passes(gm, arguments)
    call = triptych.compile_fx(gm, arguments, options=options(program.codegen))
    return lambda *arguments: tuple(call(*arguments))  # AOTAutograd returns a list; Dynamo's own code unpacks it


def compiled_by_torch(program: Program, function: Callable[..., Any], arguments: list[Any], backend: str) -> Callable[..., Any]:
    """The same with one of torch's own backends."""
    if program.route == "compile":
        given = {"options": {"fallback_random": True}} if backend == "inductor" else {}
        return torch.compile(function, backend=backend, dynamic=True if program.dynamic else None, **given)
    call = torch._dynamo.lookup_backend(backend)(graph_of(function), arguments)
    return lambda *arguments: tuple(call(*arguments))
