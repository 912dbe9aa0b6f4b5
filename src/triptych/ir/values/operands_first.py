"""Questions about a node whose answer follows from the answers for its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.fx import Node

_Answer = TypeVar("_Answer")


def answer_from_operands(
    asked: Node,
    answers: dict[Node, _Answer],
    operands_of: Callable[[Node], Sequence[Node]],
    answer: Callable[[Node, Sequence[Node]], _Answer],
) -> None:
    """Enter the answer for a node, after those for its operands. There is no recursion: a graph may be deeper than
    Python's stack."""
    work = [asked]
    while work:
        node = work[-1]
        if node in answers:
            work.pop()
            continue
        operands = operands_of(node)
        waiting = [n for n in operands if n not in answers]
        if waiting:
            work.extend(waiting)
            continue
        answers[node] = answer(node, operands)
        work.pop()
