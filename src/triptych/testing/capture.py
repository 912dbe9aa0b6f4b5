"""Captures small programs as graphs: at the torch level as Dynamo does, in ATen, and with each module as one call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from .. import _private
from ..cost import size_hint
from ..errors import TriptychError
from ..ir.facts import fact
from ..ir.graph_copies import snapshot
from ..ir.partitioned import BACKWARD, Backward, backward_of
from ..ir.program import Program
from ..rewrite.computed_once import COMPUTED_ONCE, ComputedOnce
from ..stages import joint_graph_passes


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
    """The graph of a module as `torch.fx.symbolic_trace` makes it: each submodule is one call."""
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
    if dialect == "joint":
        return capture_joint(program, inputs, dynamic)
    if dialect == "partitioned":
        return capture_partitioned(program, inputs, dynamic)
    return (capture_torch if dialect == "torch" else capture_aten)(program, inputs, dynamic)


@dataclass(frozen=True)
class _Training:
    """What AOTAutograd makes of a program whose gradient is asked for."""

    joint: GraphModule
    forward: GraphModule
    backward: GraphModule
    results: int
    inputs: list[Any]
    """The inputs of the joint graph: the program's own, then a gradient for each of its results."""


def capture_joint(
    program: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    """Forward and backward of a program in one graph, as AOTAutograd hands it to the joint stage, and inputs for it:
    the program's own, then a gradient for each of its results."""
    captured = _capture_training(program, inputs, dynamic)
    return captured.joint, captured.inputs


def capture_partitioned(
    program: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False
) -> tuple[GraphModule, list[Any]]:
    """The forward of a program, with its backward beside it (`ir.partitioned`), made of the joint graph as the joint
    stage leaves it; and the inputs of both."""
    captured = _capture_training(program, inputs, dynamic)
    captured.forward.meta[BACKWARD] = Backward(captured.backward, captured.results)
    return captured.forward, captured.inputs


def _capture_training(program: Callable[..., Any], inputs: Sequence[Any], dynamic: bool) -> _Training:
    seen: list[tuple[GraphModule, GraphModule, GraphModule, int]] = []
    given: list[Any] = []

    def partition(joint: GraphModule, joint_inputs: Any, **facts: Any) -> Any:
        whole = snapshot(joint)
        if joint_inputs:  # the joint graph of a nested region comes without inputs
            joint_graph_passes(joint)
        halves = _private.min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **facts)
        seen.append((whole, *map(snapshot, halves), facts["num_fwd_outputs"]))
        return halves

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def as_it_is(graph: GraphModule, _: Any) -> Callable[..., Any]:
            return _private.make_boxed_func(graph.forward)

        compiled = _private.aot_autograd(
            fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition,
            decompositions=_private.select_decomp_table(), keep_inference_input_mutations=True,
        )(gm, example_inputs)  # fmt: skip

        def run(*args: Any) -> Any:
            given.extend(_copy(a) for a in args)
            return compiled(*args)

        return run

    with _private.unlimited_recompiles(), torch.enable_grad():
        torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(*[_copy(i) for i in inputs])
    if not seen:
        raise TriptychError("no gradient is asked for: give an input that requires one")
    joint, forward, backward, results = seen[-1]  # the graphs of regions inside it come first
    joint.graph.set_codegen(CodeGen())  # one input after the other, not in nested lists
    joint.recompile()
    wanted = [fact(n) for n in joint.graph.nodes if n.op == "placeholder"][len(given) :]
    own = [v.detach() if isinstance(v, torch.Tensor) else v for v in given]
    return _Training(joint, forward, backward, results, own + [_made_like(t) for t in wanted])


def runnable(gm: GraphModule) -> Callable[..., Any]:
    """The graph as a function of the inputs that it was captured with: a forward runs with its backward, and values
    that were taken out to be computed once are computed first."""
    if (backward := backward_of(gm)) is not None:
        return functools.partial(_run_both, gm, backward)
    taken: ComputedOnce | None = gm.meta.get(COMPUTED_ONCE)
    if taken is None:
        return gm

    def run(*inputs: Any) -> Any:
        constants = taken.module()(*[inputs[i] for i in taken.weights])
        return gm(*[inputs[i] for i in taken.kept], *constants)

    return run


def _run_both(forward: GraphModule, backward: Backward, *inputs: Any) -> Any:
    """What the program returns, then the gradients."""
    own = len(forward.graph.find_nodes(op="placeholder"))
    made = forward(*inputs[:own])
    kept = sorted(made[backward.results :], key=lambda value: isinstance(value, torch.Tensor))  # sizes come first
    return (*made[: backward.results], *backward.gm(*kept, *inputs[own:]))


def _made_like(known: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn([size_hint(s) for s in known.shape], generator=generator).to(known.dtype)
