"""Running a graph without side effects: on copies of its inputs and weights, with a fixed seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from .. import _private
from .inputs import copy_of, placeholders

WIDER_METHODS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}


@dataclass
class Result:
    """The results of a run by name: tensors, numbers, or None for a missing gradient."""

    outputs: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)
    """Inputs and attributes after the run."""
    gradients: dict[str, Any] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, str, Any]]:
        for kind in ("outputs", "written", "gradients"):
            for name, value in getattr(self, kind).items():
                yield kind, name, value


def run_graph(
    gm: GraphModule,
    graph: Graph,
    inputs: Sequence[Any],
    *,
    writes: bool,
    gradients: bool,
    wide: bool = False,
    autocast: bool = True,
) -> Result:
    """Run `graph`, whose attributes are those of `gm`.

    `writes`: the graph may write its inputs. `gradients`: compute the gradient of every input and attribute that
    requires one. `wide`: compute in float64 throughout. `autocast`: keep the enclosing autocast region, if any.
    """
    with _apart(inputs, gradients, autocast and not wide):
        leaves = [_leaf(value, wide) for value in inputs]
        # a leaf that wants a gradient cannot be written in place
        given = [v.clone() if writes and isinstance(v, torch.Tensor) else v for v in leaves]
        runner = _Runner(gm, graph, wide)
        returned = runner.run(*given)
        result = Result(dict(zip(output_names(graph), _flat(returned))))
        if writes:
            result.written = {f"input {n.name}": v for n, v in zip(placeholders(graph), given)}
            result.written |= {f"attribute {path}": v for path, v in runner.state.items()}
        if gradients:
            sources = {f"gradient of {n.name}": v for n, v in zip(placeholders(graph), leaves)}
            sources |= {f"gradient of {path}": v for path, v in runner.state.items()}
            result.gradients = _gradients(result.outputs, sources)
        _detach(result)
    return result


def output_names(graph: Graph) -> list[str]:
    """The names of the outputs of a graph, in order."""
    leaves = _flat(graph.output_node().args[0])
    return [f"output {i} ({leaf.name})" if isinstance(leaf, Node) else f"output {i}" for i, leaf in enumerate(leaves)]


def _flat(value: Any) -> list[Any]:
    return _private.pytree.tree_leaves(value, is_leaf=lambda v: v is None)


@contextlib.contextmanager
def _apart(inputs: Sequence[Any], gradients: bool, autocast: bool) -> Iterator[None]:
    """Use a fixed seed inside; restore random state and grad mode on exit."""
    devices = {t.device.index for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=[d for d in devices if d is not None]),
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        contextlib.ExitStack() as regions,
    ):
        for device in ("cpu", "cuda") if not autocast else ():
            if torch.is_autocast_enabled(device):
                regions.enter_context(torch.autocast(device, enabled=False))
        torch.manual_seed(0)
        yield


def _leaf(value: Any, wide: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copied = copy_of(value)
    dtype = _wider(copied.dtype)
    if not wide or dtype == copied.dtype:
        return copied
    return copied.detach().to(dtype).requires_grad_(copied.requires_grad)


def _gradients(outputs: dict[str, Any], sources: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a randomly weighted sum of all outputs: the plain sum of a softmax has gradient zero."""
    wanted = {name: v for name, v in sources.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    roots, seeds = [], []
    for number, tensor in enumerate(outputs.values()):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            roots.append(tensor)
            seeds.append(drawn.to(tensor.device, tensor.dtype))
    if not roots or not wanted:
        return dict.fromkeys(wanted)
    gradients = torch.autograd.grad(roots, list(wanted.values()), seeds, allow_unused=True)
    return dict(zip(wanted, gradients))


def _detach(result: Result) -> None:
    for kind, name, value in list(result.values()):
        if isinstance(value, torch.Tensor):
            getattr(result, kind)[name] = value.detach()


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


class _Runner(Interpreter):
    """Runs a graph on copies of the tensors of its module."""

    def __init__(self, gm: GraphModule, graph: Graph, wide: bool) -> None:
        super().__init__(gm, graph=graph)
        self.wide = wide
        self.state: dict[str, torch.Tensor] = {}
        """The copies, by the path of the original."""
        self.extra_traceback = False

    def _copied(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        if path not in self.state:
            self.state[path] = _leaf(tensor, self.wide)
        return self.state[path]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._copied(str(target), value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(str(target))
        tensors = (*module.named_parameters(), *module.named_buffers())
        state = {name: self._copied(f"{target}.{name}", tensor) for name, tensor in tensors}
        return torch.func.functional_call(module, state, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self.wide:
            if getattr(target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
                return None  # autocast would narrow the values
            args, kwargs = self._widened((args, kwargs))
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self.wide:
            target, (args, kwargs) = WIDER_METHODS.get(str(target), target), self._widened((args, kwargs))
        return super().call_method(target, args, kwargs)

    def _widened(self, arguments: Any) -> Any:
        return _private.pytree.tree_map_only(torch.dtype, _wider, arguments)
