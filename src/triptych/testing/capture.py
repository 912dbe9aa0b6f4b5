"""Small programs as graphs: at the torch level as Dynamo captures them, in ATen, and with modules called whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from .. import _private
from ..cost import size_hint
from ..errors import TriptychError
from ..ir.copies import snapshot
from ..ir.facts import fact
from ..ir.program import Program


def capture_torch(
    program: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    """The graph Dynamo hands to a backend, and the inputs it would call it with."""
    seen: list[tuple[GraphModule, list[Any]]] = []
    given = [_copy(i) for i in inputs]
    number = {id(value): i for i, value in enumerate(given) if isinstance(value, torch.Tensor)}

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append((gm, list(args)))
            return gm(*args)

        return run

    with _private.unlimited_recompiles():
        # a fresh function object each time: Dynamo keeps its caches by code and backend
        torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(*given)
    gm, args = seen[0]
    # the run above may have written its inputs: hand out fresh ones; Dynamo orders them by their first use
    return gm, [_copy(inputs[number[id(a)]]) if id(a) in number else a for a in args]


def capture_modules(program: Callable[..., Any], inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """The graph of a module as `torch.fx.symbolic_trace` makes it: submodules are called whole."""
    traced = torch.fx.symbolic_trace(program)
    Program(traced, [_copy(i) for i in inputs])  # leaves the facts on the nodes
    return traced, [_copy(i) for i in inputs]


def capture_aten(
    program: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    """The functional ATen graph of a program."""
    mode: Any = "symbolic" if dynamic else "fake"
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        traced = make_fx(torch.func.functionalize(program), tracing_mode=mode)(*[_copy(i) for i in inputs])
    return traced, [_copy(i) for i in inputs]


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def capture(
    program: Callable[..., Any], inputs: Sequence[Any], dialect: str, dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    if dialect == "modules":
        return capture_modules(program, inputs)
    return (capture_torch if dialect == "torch" else capture_aten)(program, inputs, dynamic)


def capture_joint(
    program: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    """Forward and backward of a program in one graph, as AOTAutograd hands it to the joint stage, and inputs for it:
    the program's own, then a gradient for each of its results."""
    seen: list[GraphModule] = []
    given: list[Any] = []

    def partition(joint: GraphModule, joint_inputs: Any, **facts: Any) -> Any:
        seen.append(snapshot(joint))
        return _private.min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **facts)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def as_it_is(graph: GraphModule, _: Any) -> Callable[..., Any]:
            return _private.make_boxed_func(graph.forward)

        compiled = _private.aot_autograd(
            fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition,
            decompositions=_private.select_decomp_table(),
        )(gm, example_inputs)  # fmt: skip

        def run(*args: Any) -> Any:
            given.extend(_copy(a) for a in args)
            return compiled(*args)

        return run

    with _private.unlimited_recompiles(), torch.enable_grad():
        torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(*[_copy(i) for i in inputs])
    if not seen:
        raise TriptychError("no gradient is asked for: give an input that requires one")
    joint = seen[0]
    joint.graph.set_codegen(CodeGen())  # one input after the other, not in nested lists
    joint.recompile()
    wanted = [fact(n) for n in joint.graph.nodes if n.op == "placeholder"][len(given) :]
    return joint, [v.detach() if isinstance(v, torch.Tensor) else v for v in given] + [_made_like(t) for t in wanted]


def _made_like(known: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn([size_hint(s) for s in known.shape], generator=generator).to(known.dtype)
