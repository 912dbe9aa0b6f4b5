"""What the rules about attention have in common: they look at one node at a time, before a kernel is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch.fx import Node

from ..ir.program import ATEN, Program
from ..rewrite.rule import Match, Rule


class AttentionRule(Rule, ABC):
    """A rule about attention in a graph in which the kernels that compute it are still to be chosen."""

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        if program.dialect == ATEN and not program.has_composites:
            return
        for node in self.nodes(program):
            if not node._erased:
                yield from self.sites_at(program, node)

    def nodes(self, program: Program) -> list[Node]:
        """The nodes to look at, in this order."""
        return list(program.graph.nodes)

    @abstractmethod
    def sites_at(self, program: Program, node: Node) -> Iterator[Match]:
        """The sites that belong to a node, mostly none or one."""


def may_draw_otherwise(program: Program) -> bool:
    """May a fused kernel draw other numbers for its dropout than eager?"""
    return program.options.codegen == "inductor" and not program.options.fallback_random
