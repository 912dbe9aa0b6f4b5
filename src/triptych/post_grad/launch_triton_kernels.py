"""`launch_triton_kernels`: lets the code that Inductor generates launch the Triton kernels of our operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from .. import _private
from ..cost.estimate import operation_cost
from ..ir.effects import node_operands
from ..ir.facts import fact, tensor_of
from ..ir.program import Program
from ..ir.work import WORK, ProductCount, declared_work, is_launch
from ..kernels.capture import capture, capturing, has_known_grid
from ..kernels.registry import CUDA_FORMS
from ..rewrite.emit import STRIDES_RELIED_ON, Emitter
from ..rewrite.examples import declines, fires
from ..rewrite.functions import put
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

aten = torch.ops.aten

BY_TRITON = (
    "parallel_linear", "group_linear", "lce", "dot_compress", "b2b_gemm", "sum_parts", "int_mm_mul", "norm_backward",
)  # fmt: skip
"""Operators whose form on a GPU is a Triton kernel."""

NEW_MEMORY = (
    aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
"""A tensor that one of these operators allocates and that is passed to a launch is a result of the launch."""


class _ProductKernel:
    """Stands for a Triton kernel in examples: y = x @ w on any device."""

    arg_names = ("x", "w", "y")

    def __getitem__(self, grid: Any) -> Any:
        return lambda x, w, y: y.copy_(x @ w)


PRODUCT = _ProductKernel()


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(*x.shape[:-1], w.shape[-1])
    capture(PRODUCT, [(1,)], {"x": x, "w": w, "y": y})
    return y


def _dot_compress(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _product(x, x.mT @ w)


def _parallel_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], *biases: Any) -> list[torch.Tensor]:
    return [_product(x, weight.t()) for weight in weights]


def _of_two(x: Any, v: Any, w: Any) -> Any:
    first, second = torch.ops.triptych.parallel_linear(x, [v, w], [], None)
    return first + second


FORMS_ON_CPU: Mapping[str, Callable[..., Any]] = {"dot_compress": _dot_compress, "parallel_linear": _parallel_linear}
ON_CPU: dict[str, Any] = {"dialects": ("aten",), "settings": {"device": "cpu"}}


@dataclass(frozen=True)
class LaunchedKernel(Rule):
    """y = triptych::f(x, w) -> y = kernel(x, w, empty), for an operator f that is a Triton kernel

    A registered operator goes through torch's dispatcher and Python on every call: for a small kernel, the host takes
    longer than the GPU. A launch from generated code takes the host less than half of that time.
    """

    device: str = "cuda"

    def sites(self, program: Program) -> Iterator[Match]:
        if program.options.codegen != "inductor":
            return
        traces: dict[Any, GraphModule] = {}
        for name in BY_TRITON:
            for node in program.graph.find_nodes(op="call_function", target=getattr(torch.ops.triptych, name).default):
                several = isinstance(fact(node), (list, tuple))
                results = [n for n in node.users if n.target is operator.getitem] if several else [node]
                if results:
                    yield Match.at(program, *results, covers=(node,), before=node, about=node, traces=traces)

    def check(self, m):
        node = m.node
        operands = [tensor_of(n) for n in node_operands((node.args, node.kwargs))]
        m.applies(all(t.device.type == self.device for t in operands))
        m.require(has_known_grid(operands), "the launch grid needs sizes that are known at compile time")
        m.require(
            all(n.target is operator.getitem for n in node.users) or m.root.node is node,
            "its results are used as a list",
        )

    def rewrite(self, op, m):
        node = m.node
        key, traces = _question(node), m.bindings["traces"]
        if key not in traces:
            traces[key] = self._traced(op, node)
            _functional(traces[key])
        traced = traces[key]
        launched = any(n.target is _private.triton_kernel_wrapper_functional for n in traced.graph.nodes)
        m.require(launched, "no kernel for these dtypes or sizes")
        results = put(op, traced, node_operands((node.args, node.kwargs)))
        launches = [made for made in op.made if is_launch(made)]
        # the operands of a launch do not say what it computes
        elsewhere = sum(operation_cost(made).gemms for made in op.made if made not in launches)
        work = (declared_work(node) or ProductCount()).without(elsewhere)
        for launch, share in zip(launches, work.shared(len(launches))):
            launch.meta[WORK] = share
        if m.root.node is node:
            return results
        return tuple(results[root.node.args[1]] for root in m.roots)

    def _traced(self, op: Emitter, node: Node) -> GraphModule:
        """The operator's GPU implementation, traced as a graph whose inputs are the operands."""
        operands = list(node_operands((node.args, node.kwargs)))
        target: Any = node.target
        name = target.name().partition("::")[2]
        form = FORMS_ON_CPU.get(name, CUDA_FORMS[name]) if self.device == "cpu" else CUDA_FORMS[name]

        def call(*tensors: Any) -> Any:
            now = dict(zip(operands, tensors))
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: now[n])
            return form(*args, **kwargs)

        with op.program.computing(op.anchor), capturing():
            return make_fx(call, _private.select_decomp_table())(*map(fact, operands))

    examples = [
        fires(lambda x: torch.ops.triptych.dot_compress(x, x) + 1, "f32[2, 4, 4]", **ON_CPU),
        fires(_of_two, "f32[2, 4]", "f32[3, 4]", "f32[3, 4]", **ON_CPU),
        declines(lambda x: torch.ops.triptych.dot_compress(x, x), "f32[2, 4, 4]", dialects=("aten",)),
        declines(
            lambda x: torch.ops.triptych.dot_compress(x, x), "f32[2, 4, 4]", **ON_CPU, dynamic=True,
            because="sizes that are known",
        ),
        declines(lambda x: torch.ops.triptych.lce(x, x[0]), "f32[2, 4, 4]", **ON_CPU, because="no kernel"),
    ]  # fmt: skip


def _question(node: Node) -> Any:
    """Equal for calls with the same trace: the layers of a model call an operator with operands of the same sizes."""
    operands = {operand: number for number, operand in enumerate(node_operands((node.args, node.kwargs)))}
    facts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in map(tensor_of, operands))
    return node.target, facts, str(map_arg((node.args, node.kwargs), lambda n: f"operand {operands[n]}"))


def _functional(traced: GraphModule) -> None:
    """Makes launches functional: each writes to copies and returns them. `reinplace` later proves that a launch may
    write to the memory allocated for it."""
    graph = traced.graph
    for launch in graph.find_nodes(op="call_function", target=_private.triton_kernel_wrapper_mutation):
        arguments: Any = launch.kwargs["kwargs"]
        written = {name: n for name, n in arguments.items() if isinstance(n, Node) and n.target in NEW_MEMORY}
        assert written, "a launch whose result is not known would be removed"
        with graph.inserting_before(launch):
            kwargs = {**launch.kwargs, "tensors_to_clone": list(written)}
            call = graph.call_function(_private.triton_kernel_wrapper_functional, kwargs=kwargs)
            call.meta[STRIDES_RELIED_ON] = ((), map_arg(kwargs, fact))
            results = {name: graph.call_function(operator.getitem, (call, name)) for name in written}
        for name, memory in written.items():
            for user in [user for user in memory.users if user > launch]:
                user.replace_input_with(memory, results[name])
        graph.erase_node(launch)


@dataclass(frozen=True)
class LaunchTritonKernels(Pass):
    """Lets generated code launch the Triton kernels of our operators directly, without a call of the operator."""

    name = "launch_triton_kernels"

    def rules(self) -> Sequence[Rule]:
        return (LaunchedKernel(),)
