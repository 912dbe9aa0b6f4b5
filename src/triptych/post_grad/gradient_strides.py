"""`gradient_strides`: copies gradients whose strides may differ from eager's, because stage 1 rewrote the program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.facts import tensor_of
from ..ir.partitioned import gradients_with_new_strides, mark_gradients
from ..ir.program import Program
from ..rewrite.edits import ReadInstead
from ..rewrite.examples import declines, fires, mark_as_gradients
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule


def _returned(graph: Graph) -> Sequence[Node]:
    returned: Any = graph.output_node().args[0]
    return returned if isinstance(returned, (tuple, list)) else [returned]


def _of_contiguous(graph: Graph) -> None:
    """For examples: the program was rewritten, and its inputs are contiguous."""
    given = [torch.empty(tensor_of(node).shape, device="meta") for node in _returned(graph)]
    mark_gradients(graph, given, rewritten=True)


def _of_the_same_strides(graph: Graph) -> None:
    """For examples: the program was rewritten, and its inputs have the strides of their gradients."""
    mark_gradients(graph, [tensor_of(node) for node in _returned(graph)], rewritten=True)


def _of_both(graph: Graph) -> None:
    """For examples: the first input has the strides of its gradient, the second one is contiguous."""
    first, second = map(tensor_of, _returned(graph))
    mark_gradients(graph, [first, torch.empty(second.shape, device="meta")], rewritten=True)


REWRITTEN: dict[str, Any] = {"dialects": ("aten",), "prepare": _of_contiguous}


class ContiguousGradients(Rule):
    """return g -> return clone(g, memory_format=contiguous_format), where a rewrite may have changed the strides of g

    The gradient of a rewritten program may be a permuted, sliced or expanded tensor where eager computes a contiguous
    one. The backward of an operation before the program may depend on that: `g.view(-1)` in an `autograd.Function`
    would raise. The copy is what the caller may rely on, not a matter of speed, so the cost model is not asked.

    The rule takes gradients that are neither contiguous nor have the strides of the tensor that they are the gradient
    of. Where that tensor is a leaf, autograd would copy such a gradient into `.grad` in any case. Programs that stage 1
    did not rewrite are left alone: their gradients have the strides that autograd gives them.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for gradient in gradients_with_new_strides(program.graph):
            yield Match.at(program, gradient, before=program.graph.output_node())

    def rewrite(self, op, m):
        gradient = m.root.node
        copy = op.clone(gradient, memory_format=torch.contiguous_format)
        return ReadInstead(gradient, copy.node, [gradient.graph.output_node()])

    examples = [
        fires(lambda g: [(g * 2).permute(0, 2, 1)], "f32[2, 3, 4]", **REWRITTEN),
        fires(lambda g, h: [(g @ h)[:, 2:]], "f32[4, 6]", "f32[6, 5]", **REWRITTEN),
        fires(lambda g: [(g * 2)[:, None].expand(2, 3, 4)], "f32[2, 4]", **REWRITTEN),
        fires(lambda g: [(g * 2).mT], "f32[2, 3, 4]", **REWRITTEN, dynamic=True),
        fires(lambda g: (lambda h: [h, h])((g * 2).mT), "f32[2, 3, 4]", dialects=("aten",), prepare=_of_both),
        fires(lambda g: (lambda h: [h, h.exp()])((g * 2).mT), "f32[2, 3, 4]", **REWRITTEN),
        declines(lambda g: [g * 2, (g @ g.mT)[:1]], "f32[4, 4]", **REWRITTEN),
        declines(lambda g: [(g * 2).permute(1, 0, 2)], "f32[1, 3, 4]", **REWRITTEN),
        declines(lambda g: [(g * 2).mT], "f32[2, 3, 4]", dialects=("aten",), prepare=_of_the_same_strides),
        declines(lambda g: [(g * 2).mT], "f32[2, 3, 4]", dialects=("aten",), prepare=mark_as_gradients),
        declines(lambda g: [(g * 2).mT], "f32[2, 3, 4]"),
    ]  # fmt: skip


@dataclass(frozen=True)
class GradientStrides(Pass):
    """Returns a contiguous copy of a gradient whose strides may differ from eager's because stage 1 rewrote the
    program."""

    name = "gradient_strides"
    required = True

    def rules(self) -> Sequence[Rule]:
        return (ContiguousGradients(),)
