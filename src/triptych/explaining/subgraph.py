"""Extracts parts of a captured graph as programs: with fewer outputs, values turned into inputs, or calls left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..ir.alias import Aliasing
from ..repro.input_source import Input, input_like
from ..repro.python_source import NotPython

REGIONS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "set_grad_enabled")


@dataclass(frozen=True)
class Part:
    """Which part of a graph to keep."""

    outputs: tuple[Node, ...]
    cut: frozenset[Node] = frozenset()
    """Values that become inputs."""
    stand_ins: Mapping[Node, Node] = field(default_factory=dict)
    """Values that are replaced by one of their operands."""
    left_out: frozenset[Node] = frozenset()
    """Calls with side effects that are dropped."""


class Values(Interpreter):
    """What every node of a graph computes on given inputs."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.of: dict[Node, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.run(*inputs)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        # a copy, so that a later in-place write does not change it
        self.of[n] = _copied(value)
        return value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        if any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape)):
            return value.detach().requires_grad_(_wants_grad(value))
        return copy.copy_(value.detach()).requires_grad_(_wants_grad(value))
    return value


def _wants_grad(value: torch.Tensor) -> bool:
    return value.requires_grad and (value.is_floating_point() or value.is_complex())


def effects(gm: GraphModule) -> list[Node]:
    """Calls with side effects: writes, and the borders of regions."""
    aliasing = Aliasing(gm.graph)
    return [n for n in gm.graph.nodes if n.op.startswith("call") and _has_effect(aliasing, n)]


def _has_effect(aliasing: Aliasing, node: Node) -> bool:
    seen = aliasing.effects(node)
    return bool(seen.writes or seen.kept or seen.barrier) or is_region(node)


def is_region(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in REGIONS


def extract(gm: GraphModule, inputs: Sequence[Input], values: Values, part: Part) -> tuple[GraphModule, list[Input]]:
    """The part as a graph with the inputs that it needs."""
    known = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs))
    needed = _needed(part, [n for n in effects(gm) if n not in part.left_out])
    graph = Graph()
    copies: dict[Node, Node] = {}
    new_inputs: list[Input] = []
    for node in gm.graph.nodes:  # inputs first, whatever they were before
        if node in needed and (node.op == "placeholder" or node in part.cut):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            new_inputs.append(known[node] if node in known else _as_input(node, values))
    for node in gm.graph.nodes:
        if node not in needed or node in copies or node.op == "output":
            continue
        if node in part.stand_ins:
            copies[node] = copies[part.stand_ins[node]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in part.outputs))
    return GraphModule(gm, graph), new_inputs


def _as_input(node: Node, values: Values) -> Input:
    value = values.of[node]
    if not isinstance(value, (torch.Tensor, int, float, bool)):
        raise NotPython(f"{node.name} is no tensor")
    return input_like(value)


def _needed(part: Part, effectful: Iterable[Node]) -> set[Node]:
    needed: set[Node] = set()
    work = [*part.outputs, *effectful]
    while work:
        node = work.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in part.cut:
            continue
        work += [part.stand_ins[node]] if node in part.stand_ins else node.all_input_nodes
    return needed


def stand_in(node: Node, values: Values) -> Node | None:
    """An operand of the same shape and dtype, to take the place of a value."""
    value = values.of.get(node)
    for operand in node.all_input_nodes:
        other = values.of.get(operand)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if value.shape == other.shape and value.dtype == other.dtype:
                return operand
    return None


def resized(gm: GraphModule, inputs: Sequence[Input], old: int, new: int) -> tuple[GraphModule, list[Input]]:
    """The graph with `new` for each size `old` of the inputs, and for each such number in a call. It may not run."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for was, now in copies.items():
        now.meta = dict(was.meta)
        if now.op.startswith("call"):
            now.args, now.kwargs = _map_numbers((now.args, now.kwargs), old, new)
    return GraphModule(gm, graph), [_resized_input(one, old, new) for one in inputs]


def _map_numbers(value: Any, old: int, new: int) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return new if value == old else value
    if isinstance(value, (list, tuple)):
        return type(value)(_map_numbers(v, old, new) for v in value) if type(value) is tuple else [
            _map_numbers(v, old, new) for v in value
        ]
    if isinstance(value, dict):
        return {k: _map_numbers(v, old, new) for k, v in value.items()}
    return value


def _resized_input(one: Input, old: int, new: int) -> Input:
    if not one.is_tensor or old not in one.shape:
        return one
    shape = tuple(new if n == old else n for n in one.shape)
    # dense strides with the same order of dims
    order = sorted(range(len(shape)), key=lambda d: (-one.stride[d], d))
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim], step = step, step * max(shape[dim], 1)
    if any(s == 0 for s in one.stride):
        stride = [0 if was == 0 else now for was, now in zip(one.stride, stride)]
    return one.with_shape(shape, tuple(stride))


def with_facts(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Store on every node the value that it computes, for the listing."""
    for node, value in Values(gm, inputs).of.items():
        node.meta["example_value"] = value
