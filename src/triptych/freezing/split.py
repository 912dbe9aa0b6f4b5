"""An inference graph in two: what is computed from weights alone, and the rest."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _private
from ..ir.alias import Aliasing
from ..ir.facts import fact, is_static, tensor_fact
from ..ir.modules import attribute
from ..ir.origins import Origins
from ..ir.weights import FIXED

DETERMINISTIC = frozenset(["aten", "prims", "triptych", "quantized_decomposed"])
"""Namespaces whose operations give the same result for the same operands; of a custom operator nobody knows."""

LARGE = 16 * 2**20
GROWTH = 8
"""A value of more bytes than LARGE, and GROWTH times those of the weights it comes from, is not kept."""


@dataclass
class Split:
    """What became of a graph, which now takes `constants` as inputs after the inputs it kept."""

    constants_graph: GraphModule
    """From the weights at `weights` to the constants."""
    weights: list[int]
    kept: list[int]
    """Which of the inputs the graph still takes, by their old place."""
    constants: list[Node]
    """The new inputs."""
    moved: int
    """How many operations are gone."""

    @property
    def bytes(self) -> int:
        return sum(_bytes(n) for n in self.constants)


def split_constants(steady: Steady, limit: int | None = None) -> Split | None:
    """Take what is computed from weights alone out of the graph, in place; None if there is nothing.

    Views of weights stay: they cost nothing. So does what is computed from no weight at all (masks, positions):
    the passes that follow know better what to do with it. A value that the graph returns is made on every call, for
    the caller may write to it. `limit` bounds the number of constants, for a bisection.
    """
    gm, cuts = steady.gm, steady.cuts()[:limit]
    if not cuts:
        return None
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    constants_graph, sources = _graph_of(gm, cuts)
    moved = len([n for n in constants_graph.graph.nodes if n.op == "call_function"])
    constants = _take_as_inputs(gm.graph, cuts)
    for node in reversed(steady.order):
        if not node.users and node.op == "call_function":
            gm.graph.erase_node(node)
    place = {node: i for i, node in enumerate(inputs)}
    split = Split(constants_graph, [place[n] for n in sources], [], constants, moved)
    for node in inputs:
        if not node.users and node in steady.from_weights:
            gm.graph.erase_node(node)
            continue
        split.kept.append(place[node])
    gm.recompile()
    return split


class Steady:
    """Which values are the same on every call, and at which of them to cut."""

    def __init__(self, gm: GraphModule, origins: Origins) -> None:
        self.gm, self.origins = gm, origins
        self.aliasing = Aliasing(gm.graph)
        self.declined: list[tuple[Node, str]] = []
        """Weights, and values made of them, that are left in the graph, each with the reason."""
        self.order: list[Node] = []
        """Everything that is the same on every call."""
        self.from_weights: set[Node] = set()
        self._steady: set[Node] = set()
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                steady = origins.is_weight(node) and self._is_plain(node) and not self._is_written(node)
            elif node.op == "get_attr":
                steady = isinstance(attribute(gm, node.target), torch.Tensor) and not self._is_written(node)
            else:
                steady = self._is_steady(node)
            if steady:
                self.order.append(node)
                self._steady.add(node)
                if node.op == "placeholder" or any(n in self.from_weights for n in node.all_input_nodes):
                    self.from_weights.add(node)

    def mark_fixed(self) -> None:
        """Weights lie in the same memory on every call: CUDA graphs need not copy them, and passes know them by it."""
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" and self.origins.is_weight(node):
                node.meta[FIXED] = True

    def _is_written(self, node: Node) -> bool:
        if not self.aliasing.written(node):
            return False
        self.declined.append((node, "the graph itself writes it"))
        return True

    def _is_plain(self, node: Node) -> bool:
        known = tensor_fact(node)
        if known is None or not _private.is_ordinary(known) or not is_static(known.shape):
            self.declined.append((node, "no plain tensor of fixed shape"))
            return False
        tensor = self.origins.tensor(node)
        if tensor is not None and tensor.is_inference():
            self.declined.append((node, "an inference tensor: nobody could tell that it has changed"))
            return False
        return True

    def _is_steady(self, node: Node) -> bool:
        if node.op != "call_function" or not all(n in self._steady for n in node.all_input_nodes):
            return False
        value = fact(node)
        made = value if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(v, torch.Tensor) and v.layout == torch.strided and is_static(v.shape) for v in made):
            return False
        if node.target is operator.getitem:
            return True
        if not isinstance(node.target, _private.OpOverload) or not self.aliasing.effects(node).pure:
            return False
        return node.target.namespace in DETERMINISTIC

    def _is_computed(self, node: Node) -> bool:
        """A tensor that is no view of anything: memory of its own."""
        if node not in self.from_weights or node.op == "placeholder" or tensor_fact(node) is None:
            return False
        maker = node.args[0] if node.target is operator.getitem else node
        return isinstance(maker, Node) and not self.aliasing.effects(maker).aliases

    def cuts(self) -> list[Node]:
        """The computed values that the rest of the graph reads, in order."""
        fresh = self._returned_memory()
        cut: set[Node] = set()
        seen: set[Node] = set()
        work = [n for node in self.gm.graph.nodes if node not in self._steady for n in node.all_input_nodes]
        while work:
            node = work.pop()
            if node in seen or node not in self._steady:
                continue
            seen.add(node)
            if self._is_computed(node) and node not in fresh and not self._is_too_large(node):
                cut.add(node)
            else:
                work.extend(node.all_input_nodes)
        return [n for n in self.order if n in cut]

    def _returned_memory(self) -> set[Node]:
        """Values whose memory the caller gets: it must be new on every call."""
        returned: set[Node] = set()
        work = list(self.gm.graph.output_node().all_input_nodes)
        while work:
            node = work.pop()
            if node in self._steady and node not in returned:
                returned.add(node)
                if not self._is_computed(node):
                    work.extend(node.all_input_nodes)
        return returned

    def _is_too_large(self, node: Node) -> bool:
        if _bytes(node) <= LARGE or _bytes(node) <= GROWTH * sum(map(_bytes, _weights_behind(node))):
            return False
        self.declined.append((node, f"{_bytes(node)} bytes, far more than the weights it comes from"))
        return True


def _bytes(node: Node) -> int:
    known = tensor_fact(node)
    return 0 if known is None else known.numel() * known.itemsize


def _weights_behind(node: Node) -> list[Node]:
    return [n for n in _ancestors([node]) if n.op == "placeholder"]


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    seen: set[Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in seen:
            seen.add(node)
            work.extend(node.all_input_nodes)
    return seen


def _graph_of(gm: GraphModule, cuts: list[Node]) -> tuple[GraphModule, list[Node]]:
    """The graph that makes the cut values, and the inputs it takes."""
    needed = _ancestors(cuts)
    graph = Graph()
    copied: dict[Node, Node] = {}
    sources = []
    for node in gm.graph.nodes:
        if node in needed:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            if node.op == "placeholder":
                sources.append(node)
    graph.output(tuple(copied[n] for n in cuts))
    return GraphModule(gm, graph, "Constants"), sources


def _take_as_inputs(graph: Graph, cuts: list[Node]) -> list[Node]:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    constants = []
    for node in cuts:
        with graph.inserting_before(first):
            constant = graph.placeholder(f"constant_{node.name}")
        constant.meta = {"val": fact(node), FIXED: True}
        node.replace_all_uses_with(constant, propagate_meta=False)
        constants.append(constant)
    return constants
