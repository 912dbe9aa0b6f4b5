"""Puts a graph into an order in which it can run, moving only what must move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ir.order import predecessors
from ..ir.program import Program
from ..rewrite.edits import Move, Reorder
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule

CYCLE = "no order puts every value before its uses and keeps the order of writes, random draws and regions"


def _add_in_place(x):
    x.add_(1)
    return x.relu() + x


def _out_of_order(graph: Graph) -> None:
    """For examples: moves the first call behind its first use."""
    first = next(n for n in graph.nodes if n.op.startswith("call"))
    next(iter(first.users)).append(first)


class MoveUp(Rule):
    """use(y); y = f(x) -> y = f(x); use(y)

    All values that are computed after their first use move in one edit, because only a complete order is valid.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        moves = needed_moves(program)
        if moves is None:
            last = next(iter(reversed(program.graph.nodes)))
            yield Match.at(program, last, problem=CYCLE)
        elif moves:
            nodes = [node for node, _ in moves]
            yield Match.at(program, *nodes, names=[self.name] * len(moves), moves=[Move(*move) for move in moves])

    def rewrite(self, op, moves):
        return Reorder(moves)

    examples = [
        fires(lambda x: (x + 1).relu(), "f32[4]", prepare=_out_of_order),
        fires(lambda x, y: torch.cat([x * 2, y, x.exp()]), "f32[4]", "f32[2]", prepare=_out_of_order),
        declines(lambda x: (x + 1).relu(), "f32[4]"),
        declines(_add_in_place, "f32[4]", dialects=("torch",)),
    ]


@dataclass(frozen=True)
class StableTopologicalSort(Pass):
    """Moves a value that is used before it is computed up to its first use; everything else stays in place.

    Writes, random draws and regions keep their order, and no read moves across a write.
    """

    name = "stable_topological_sort"

    def rules(self) -> Sequence[Rule]:
        return (MoveUp(),)


def needed_moves(program: Program) -> list[tuple[Node, Node]] | None:
    """The moves to make, in order: each a node and the node before which it goes. Empty if the order is already valid,
    None if there is no valid order."""
    nodes = list(program.graph.nodes)
    if _is_sorted(nodes):
        return []
    before = predecessors(program, nodes)
    place = {node: i for i, node in enumerate(nodes)}
    done: set[Node] = set()
    moves: list[tuple[Node, Node]] = []
    for anchor in nodes:
        if anchor in done:
            continue
        # depth first, without recursion: chains are as long as graphs
        path: list[tuple[Node, Iterator[Node]]] = []
        on_path: set[Node] = set()
        enter: Node | None = anchor
        while enter is not None or path:
            if enter is not None:
                if enter in on_path:
                    return None
                on_path.add(enter)
                missing = sorted((n for n in before[enter] if n not in done), key=place.__getitem__)
                path.append((enter, iter(missing)))
            node, waiting = path[-1]
            enter = next((n for n in waiting if n not in done), None)
            if enter is None:
                path.pop()
                done.add(node)
                if node is not anchor:
                    moves.append((node, anchor))
    return moves


def _is_sorted(nodes: list[Node]) -> bool:
    seen: set[Node] = set()
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                return False
        seen.add(node)
    return True
