"""merge_concats_pass: merges nested concatenations, and replaces a concatenation whose operands are adjacent in another
one by a slice of that one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from ..ir.facts import tensor_fact
from ..ir.program import Program
from ..pieces.nested import MOST_USERS, Nested, joined_operands
from ..rewrite.examples import declines, fires
from ..rewrite.passes import Pass
from ..rewrite.rule import Match, Rule


class CatOfCat(Nested):
    """cat([cat([a, b], d), c], d) -> cat([a, b, c], d)"""

    inner = "cat"

    examples = [
        fires(lambda a, b, c: torch.cat([torch.cat([a, b]), c]), "f32[2]", "f32[3]", "f32[4]"),
        fires(lambda a, b: torch.cat((a, torch.concat((b, a), -1)), axis=1),  # type: ignore[call-arg]
              "f32[4, 2]", "f32[4, 3]"),
        fires(lambda a, b, c: torch.hstack([torch.hstack([a, b]), c]), "i64[4, 2]", "i64[4, 3]", "i64[4, 1]"),
        fires(lambda a, b: torch.cat([torch.cat([torch.cat([a, b]), b]), a]), "f32[2, 3]", "f32[4, 3]"),
        fires(lambda a, b: torch.cat([torch.cat([a, b]), torch.cat([b, a])]), "f32[2, 3]", "f32[4, 3]"),
        # two outer cats of the same inner cat, which is no longer computed
        fires(lambda a, b: (lambda c: (torch.cat([c, a]), torch.cat([c, b])))(torch.cat([a, b])),
              "f32[2]", "f32[3]"),
        fires(lambda a, b: torch.cat([torch.cat([a, b]), b]), "f16[2]", "f32[3]"),  # converted once
        fires(lambda e, a, b: torch.cat([torch.cat([e, a], 1), b], 1), "f32[0]", "f32[4, 2]", "f32[4, 3]"),
        fires(lambda a, b, c: torch.cat([torch.cat([a, b], 1), c], 1), "f32[4, 2]", "f32[4, 3]", "f32[4, 1]",
              dynamic=True),
        fires(lambda a, b: torch.cat([torch.cat([a, b]), a]).add_(1), "f32[2]", "f32[3]", dialects=["torch"]),
        declines(lambda a, b: torch.cat([torch.cat([a, b]), torch.cat([b, a])], 1), "f32[2, 3]", "f32[4, 3]"),
        declines(lambda a, b: (lambda c: (torch.cat([c, a]), c * 2))(torch.cat([a, b])), "f32[2]", "f32[3]",
                 because="used elsewhere"),
        declines(lambda a, b: (lambda c: (torch.cat([c, a]), c))(torch.cat([a, b])), "f32[2]", "f32[3]",
                 because="used elsewhere"),
        declines(lambda a, b, c: torch.cat([torch.cat([a, b]), c]), "i64[2]", "f32[3]", "f64[4]",
                 because="converted"),
        declines(lambda a, b: _write_after_cat(a, b), "f32[2]", "f32[3]", dialects=["torch"],
                 because="in between"),
        declines(lambda a, b: torch.cat([a, b]), "f32[2]", "f32[3]"),
    ]  # fmt: skip


def _write_after_cat(a: Any, b: Any) -> Any:
    """For examples: the inner cat has the values from before the write."""
    inner = torch.cat([a, b])
    a.add_(1)
    return torch.cat([inner, b])


class CatHeldByAnother(Rule):
    """cat([a, b, c]) and cat([b, c]) -> the second is a slice of the first"""

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.calls_of("cat"):
            call = None if node._erased else program.call(node)
            dim = call.get("dim") if call is not None and call.op == "cat" else None
            operands = None if dim is None else joined_operands(program, node, "cat", dim)
            if operands is None or not node.users:
                continue
            for other, part in _holders(program, node, operands, dim):
                place, covers = (node, [other]) if other < node else (other.next, [])
                yield Match.at(program, node, covers=covers, before=place, other=other, dim=dim, part=part)
                if node._erased or program.aliasing.is_output(node):
                    break

    def check(self, m):
        leaves = m.program.aliasing.is_output(m.root.node)
        part = "the value leaves the graph, and would share memory with {found}"
        m.require(not leaves, part, found=m.bindings["other"])

    def rewrite(self, op, other, dim, part):
        return op.slice(other, dim, part.start, part.stop) if part is not None else other

    examples = [
        fires(lambda a, b, c: (torch.cat([a, b, c]).sum(), torch.concat([b, c]) * 2),
              "f32[2]", "f32[3]", "f32[4]"),
        fires(lambda a, b, c: (lambda p, q: (p * 2, q.sum()))(torch.cat([a, b]), torch.cat([a, b, c])),
              "f32[2, 3]", "f32[3, 3]", "f32[4, 3]"),
        fires(lambda a, b: torch.cat([a, b], 1).relu() + torch.cat([a, b], -1), "f32[2, 3]", "f32[2, 4]"),
        fires(lambda a, b: torch.cat([a, b]).relu() + torch.cat([a, b]), "f32[2, 3]", "f32[4, 3]",
              dynamic=True),
        declines(lambda a, b: (torch.cat([a, b]), torch.cat([a, b])), "f32[2]", "f32[3]",
                 because="leaves the graph"),
        fires(lambda a, b, c: (torch.cat([a, b, c], 1).sum(), torch.cat([b, c], 1) * 2),
              "f32[2, 2]", "f32[2, 2]", "f32[2, 2]"),
        fires(lambda a, b, c: (torch.cat([a, b, c], 1) * 2, F.relu(torch.cat([a, b], -1)).view(-1)),
              "f32[2, 2]", "f32[2, 3]", "f32[2, 4]", dialects=["torch"]),
        declines(lambda a, b, c: (torch.cat([a, b, c], 1).sum(), torch.cat([b, c], 1).view(-1) * 2),
                 "f32[2, 2]", "f32[2, 2]", "f32[2, 2]", because="stride"),
        declines(lambda a, b, c: (torch.cat([a, b, c]).sum(), torch.cat([a, b]) * 2),
                 "f32[2]", "f32[3]", "f64[4]", because="dtype"),
        declines(lambda a, b, c: (torch.cat([a, b, c]).sum(), torch.cat([a, c]) * 2),
                 "f32[2]", "f32[3]", "f32[4]"),
        declines(lambda a, b: _write_between_cats(a, b), "f32[2]", "f32[3]", dialects=["torch"],
                 because="in between"),
    ]  # fmt: skip


def _write_between_cats(a: Any, b: Any) -> Any:
    first = torch.cat([a, b]).relu()
    a.add_(1)
    return first + torch.cat([a, b])


def _holders(
    program: Program, node: Node, operands: Sequence[Any], dim: Any
) -> Iterator[tuple[Node, slice | None]]:
    """Cats in which these operands are adjacent, each with the slice of it that they make up; None for all of it."""
    for user in list(itertools.islice(operands[0].users, MOST_USERS)):
        outer = joined_operands(program, user, "cat", dim) if user is not node else None
        if outer is None or (outer == operands and not user < node):
            continue  # of two equal cats only the later one is replaced
        count = len(operands)
        at = next((i for i in range(len(outer) - count + 1) if outer[i : i + count] == operands), None)
        if at is not None:
            end = None if at + count == len(outer) else _length(outer[: at + count], dim)
            yield user, None if outer == operands else slice(_length(outer[:at], dim), end)


def _length(tensors: Sequence[Any], dim: Any) -> Any:
    """The total size of tensors along a dim; legacy empty vectors, which `cat` skips, count as 0."""
    facts = [tensor_fact(t) for t in tensors]
    return sum(t.shape[dim] for t in facts if t is not None and t.dim() > dim)


RULES: Sequence[Rule] = (CatOfCat(), CatHeldByAnother())


@dataclass(frozen=True)
class MergeConcatsPass(Pass):
    """Flattens nested concatenations, and replaces a concatenation whose operands are adjacent in another one by a
    slice of that one."""

    name: ClassVar[str] = "merge_concats_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
