"""What the rules about attention have in common: they examine one node at a time, before a kernel is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch.fx import Node

from ..ir.program import ATEN, Program
from ..rewrite.rule import Match, Rule
from .scaled_softmax import scaled_softmax
from .softmax_forms import SoftmaxForm, named_softmax, written_softmax


class AttentionRule(Rule, ABC):
    """A rule about attention in a graph in which the kernels that compute it are still to be chosen."""

    exact = False
    reads_decomposed: ClassVar[bool] = False
    """Does the rule read and write ATen graphs in which `matmul`, `softmax` and similar operators are decomposed?"""

    def sites(self, program: Program) -> Iterator[Match]:
        if is_decomposed(program) and not self.reads_decomposed:
            return
        for node in self.nodes(program):
            if not node._erased:
                yield from self.sites_at(program, node)

    def nodes(self, program: Program) -> list[Node]:
        """The nodes to examine, in this order."""
        return list(program.graph.nodes)

    def softmax(self, program: Program, node: Node) -> SoftmaxForm | None:
        """The softmax whose last node this is; before autograd, `softmax_by_hand` has replaced those written out."""
        return named_softmax(program, node)

    @abstractmethod
    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        """The sites that belong to a node, mostly none or one."""


class InDecomposedGraph(AttentionRule, ABC):
    """A rule about attention in a graph after autograd, where a softmax is mostly written out.

    It is read as it stands, and not given its name first: where nothing is fused it stays as code generators want it.
    """

    reads_decomposed = True

    def softmax(self, program: Program, node: Node) -> SoftmaxForm | None:
        form = named_softmax(program, node) or written_softmax(program, node) or scaled_softmax(program, node)
        is_plain = form is not None and form.sign == 1 and form.values is None and form.problem is None
        return form if is_plain else None


def is_decomposed(program: Program) -> bool:
    """Is it an ATen graph as after autograd, which must not have an operator whose kernel is still to be chosen?"""
    return program.dialect == ATEN and not program.has_composites


def may_draw_otherwise(program: Program) -> bool:
    """May a fused kernel draw other numbers for its dropout than eager?"""
    return program.options.codegen == "inductor" and not program.options.fallback_random
