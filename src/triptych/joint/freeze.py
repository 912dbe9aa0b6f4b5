"""`freeze`: computes values that depend on weights alone once, before the graph is called."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from ..ir.facts import fact, is_static, tensor_fact
from ..ir.modules import attribute
from ..ir.program import Program
from ..ir.weights import FIXED, is_weight
from ..rewrite.computed_once import COMPUTED_ONCE, DropInputs, TakeOut, ancestors
from ..rewrite.examples import declines, fires, others_are_weights
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

DETERMINISTIC = frozenset(["aten", "prims", "triptych", "quantized_decomposed"])
"""Namespaces whose operations give the same result for the same operands; for a custom operator that is unknown."""

LARGE = 16 * 2**20
GROWTH = 8
"""A value of more than LARGE bytes, and of more than GROWTH times its weights' bytes, is not computed in advance."""


FROZEN: dict[str, Any] = {"dialects": ("aten",), "prepare": others_are_weights, "options": {"freeze": True}}


class ComputeOnce(Rule):
    """f(x, g(w)) -> f(x, c), where w are weights and c = g(w) is computed before the first call

    Views of weights stay in the graph: they cost nothing. Values that depend on no weight, such as masks and positions,
    stay too: the passes that follow can simplify them. A value that the graph returns is computed on every call,
    because the caller may write to it.
    """

    @classmethod
    def rule_name(cls) -> str:
        return "computed_once"

    def sites(self, program: Program) -> Iterator[Match]:
        if not program.options.freeze or not program.is_inference:
            return
        steady = Steady(program)
        cuts = steady.cuts()
        for node, reason in steady.declined:
            yield Match.at(program, node, problem=reason)
        for node in cuts:
            yield Match.at(program, node, edit=TakeOut(node, FIXED))
        if COMPUTED_ONCE in program.gm.meta:
            inputs = program.graph.find_nodes(op="placeholder")
            unread = [n for n in inputs if not n.users and n in steady.from_weights]
            yield Match.at(program, program.graph.output_node(), names=(), edit=DropInputs(unread))

    def rewrite(self, op, m):
        return m.bindings["edit"]

    examples = [
        fires(lambda x, w: x @ (w * 2).t(), "f32[4, 8]", "f32[6, 8]", **FROZEN),
        fires(lambda x, w, s: x * (w * s) + w.exp(), "f32[4, 8]", "f32[8]", "f32[8]", **FROZEN),
        fires(lambda x, w: (lambda y: x * y + x * y.sin())(w + 1), "f32[4, 8]", "f32[8]", **FROZEN),
        declines(lambda x, w: x @ w.t(), "f32[4, 8]", "f32[6, 8]", **FROZEN),
        declines(lambda x, w: (x + 1, w * 2), "f32[4, 8]", "f32[8]", **FROZEN),
        declines(lambda x, w: x * w.bernoulli(), "f32[4, 8]", torch.full((8,), 0.5), **FROZEN),
        declines(lambda x, w: x + (w * 2).expand(4, 3000, 1500).sum(1).clone(), "f32[4, 1500]", "f32[1500]",
                 dialects=("aten",), options={"freeze": True}),
    ]  # fmt: skip


class Steady:
    """Finds the values that are the same on every call, and which of them to take out of the graph."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph, self.aliasing = program, program.graph, program.aliasing
        self.declined: list[tuple[Node, str]] = []
        """Weights, and values computed from them, that are left in the graph, each with the reason."""
        self.order: list[Node] = []
        """Everything that is the same on every call."""
        self.from_weights: set[Node] = set()
        self._steady: set[Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                steady = is_weight(node) and self._is_plain(node) and not self._is_written(node)
            elif node.op == "get_attr":
                steady = isinstance(attribute(program.gm, node.target), torch.Tensor) and not self._is_written(node)
            else:
                steady = self._is_steady(node)
            if steady:
                self.order.append(node)
                self._steady.add(node)
                if node.op == "placeholder" or any(n in self.from_weights for n in node.all_input_nodes):
                    self.from_weights.add(node)

    def _is_written(self, node: Node) -> bool:
        if not self.aliasing.written(node):
            return False
        self.declined.append((node, "the graph itself writes it"))
        return True

    def _is_plain(self, node: Node) -> bool:
        known = tensor_fact(node)
        if known is None or not _private.is_ordinary(known) or not is_static(known.shape):
            self.declined.append((node, "it is not a plain tensor of fixed shape"))
            return False
        tensor = self.program.origins.tensor(node) if self.program.origins is not None else None
        if tensor is not None and tensor.is_inference():
            self.declined.append((node, "it is an inference tensor, and a change of it could not be detected"))
            return False
        return True

    def _is_steady(self, node: Node) -> bool:
        if node.op != "call_function" or not all(n in self._steady for n in node.all_input_nodes):
            return False
        value = fact(node)
        results = value if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(v, torch.Tensor) and v.layout == torch.strided and is_static(v.shape) for v in results):
            return False
        if node.target is operator.getitem:
            return True
        if not isinstance(node.target, _private.OpOverload) or not self.aliasing.effects(node).pure:
            return False
        return node.target.namespace in DETERMINISTIC

    def _is_computed(self, node: Node) -> bool:
        """Is the node a tensor that is computed from weights into new memory, and so no view?"""
        if node not in self.from_weights or node.op == "placeholder" or tensor_fact(node) is None:
            return False
        maker = node.args[0] if node.target is operator.getitem else node
        return isinstance(maker, Node) and not self.aliasing.effects(maker).aliases

    def cuts(self) -> list[Node]:
        """The computed values that the rest of the graph reads, in order."""
        fresh = self._returned_memory()
        cut: set[Node] = set()
        seen: set[Node] = set()
        work = [n for node in self.graph.nodes if node not in self._steady for n in node.all_input_nodes]
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
        work = list(self.graph.output_node().all_input_nodes)
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
        self.declined.append((node, f"it has {_bytes(node)} bytes, far more than the weights that it depends on"))
        return True


def _bytes(node: Node) -> int:
    known = tensor_fact(node)
    return 0 if known is None else known.numel() * known.itemsize


def _weights_behind(node: Node) -> list[Node]:
    return [n for n in ancestors([node]) if n.op == "placeholder"]


@dataclass(frozen=True)
class Freeze(Pass):
    """Computes what depends on weights alone once, before the first call: with the option `freeze`, in inference."""

    name = "freeze"
    changes_interface = True

    def rules(self) -> Sequence[Rule]:
        return (ComputeOnce(),)
