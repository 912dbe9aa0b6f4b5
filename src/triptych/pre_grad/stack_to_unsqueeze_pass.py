"""stack_to_unsqueeze_pass: stacks that are a view of what is there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ir.facts import fact
from ..match.pattern import Tensor
from ..passes.base import Pass
from ..rewrite.emit import Emitter
from ..rewrite.rule import Match, Rule
from ..testing import declines, fires
from .pieces import Run, copied, only_used_by, operand_pieces, runs, take_up


class StackOfOne(Rule):
    """stack([x], dim) -> unsqueeze(x, dim)"""

    def pattern(self, op, x: Tensor, dim):
        return op.stack([x], dim=dim)

    def rewrite(self, op, x, dim):
        return op.unsqueeze(x, dim)

    examples = [
        fires(lambda x: torch.stack([x]) + 1, "f32[4, 8]"),
        fires(lambda x: torch.stack((x,), dim=-1).relu(), "f32[4, 8]"),
        fires(lambda x: torch.stack(tensors=[x], dim=1) * 2, "f32[4, 8]", dynamic=True),
        fires(lambda x: torch.stack([x]) * 2, "f32[]"),
        fires(lambda x: torch.stack([x.relu()]), "f32[0, 8]"),
        declines(lambda x: torch.stack([x]), "f32[4, 8]", because="leaves the graph"),
        declines(lambda x: torch.stack([x.t()]) * 2, "f32[4, 8]", because="stride"),
        declines(lambda x: torch.stack([x]).add_(1), "f32[4, 8]", dialects=["torch"], because="written"),
        declines(lambda x: torch.stack([x, x]) * 2, "f32[4, 8]"),
    ]


class StackOfPieces(Rule):
    """stack of the pieces of x -> x, its dims in another order or one of them in two"""

    def pattern(self, op, tensors, dim):
        return op.stack(tensors, dim=dim)

    def check(self, m, tensors):
        _only_run(m, tensors)

    def rewrite(self, op, tensors, dim, m):
        return _stacked(op, _only_run(m, tensors), dim)

    examples = [
        fires(lambda x: torch.stack(x.unbind(1), dim=1) + 1, "f32[4, 3, 2]"),
        fires(lambda x: torch.stack(torch.unbind(x)) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack([row for row in x]).relu(), "f32[4, 3]"),
        fires(lambda x: torch.stack([x.select(-1, i) for i in range(3)], -1) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind(-1)) * 2, "f32[3]"),
        fires(lambda x: torch.stack(x.chunk(2)) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x[1:3].unbind()) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack([x[1], x[2]]) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind(1), 1) * 2, "f32[4, 3]", dynamic=True, dialects=["torch"]),
        declines(lambda x: torch.stack(x.unbind()), "f32[4, 3]", because="leaves the graph"),
        declines(lambda x: torch.stack(x.unbind(), 1) * 2, "f32[4, 3]", because="stride"),
        declines(lambda x: torch.stack([x[1], x[0]]) * 2, "f32[2, 3]", because="order"),
        declines(lambda x: torch.stack([x[0], x[2]]) * 2, "f32[3, 3]", because="order"),
        declines(lambda x: _write(torch.stack(x.unbind()), x), "f32[3]", dialects=["torch"],
                 because="written"),
        declines(lambda x, y: torch.stack([x[0], y[0]]) * 2, "f32[3]", "f32[3]"),
    ]


class CopyOfStackedPieces(Rule):
    """stack of the pieces of x -> a copy of x so seen, where it must be memory of its own or lie otherwise"""

    def pattern(self, op, tensors, dim):
        return op.stack(tensors, dim=dim)

    def check(self, m, tensors):
        _only_run(m, tensors, m.applies)

    def rewrite(self, op, tensors, dim, m):
        return copied(op, _stacked(op, _only_run(m, tensors), dim), m.root.tensor)

    examples = [
        fires(lambda x: torch.stack(x.unbind(), 1) * 2, "f32[4, 3]"),
        fires(lambda x: torch.stack(x.unbind(-1), 0), "f32[4, 3, 2]"),
        fires(lambda x: torch.stack(x.unbind()), "f32[4, 3]"),
        fires(lambda x: torch.stack(x.chunk(3, 1)), "f32[4, 6]"),
        fires(lambda x: torch.stack(x.split(2, dim=1), -1), "f32[4, 6]"),
        fires(lambda x: torch.stack(x.split([3, 3], 1)), "f32[4, 6]", dynamic=True),
        fires(lambda x: _write(torch.stack(x.unbind()), x), "f32[3]", dialects=["torch"]),
        declines(lambda x: torch.stack([x[1], x[0]]), "f32[2, 3]"),
        declines(lambda x, y: torch.stack([x, y]), "f32[2, 3]", "f32[2, 3]"),
    ]


class StackIntoCat(Rule):
    """cat([stack([a, b], d), c], d) -> cat([unsqueeze(a, d), unsqueeze(b, d), c], d)"""

    def pattern(self, op, tensors, dim):
        return op.cat(tensors, dim=dim)

    def check(self, m, tensors, dim):
        m.applies(isinstance(tensors, (list, tuple)) and len(tensors) > 1, "one operand, or not listed")
        stacks = [t for t in dict.fromkeys(tensors) if _stack_operands(t, dim)]
        m.applies(stacks, "no stack among the operands")
        own = [t for t in stacks if list(t.node.users) == [m.root.node]]
        take_up(m, stacks, own)

    def rewrite(self, op, tensors, dim, m):
        flat: list[Any] = []
        for t in tensors:
            flat += [op.unsqueeze(x, dim) for x in _stack_operands(t, dim)] if t.node in m.nodes else [t]
        return op.cat(flat, dim=dim)

    examples = [
        fires(lambda a, b, c: torch.cat([torch.stack([a, b]), c]), "f32[3]", "f32[3]", "f32[4, 3]"),
        fires(lambda a, b, c: torch.cat([c, torch.stack([a, b], -1)], 1), "f32[4]", "f32[4]", "f32[4, 3]"),
        fires(lambda a, b, c: torch.cat([torch.stack([a, b]), c]), "f32[3]", "f32[3]", "f32[4, 3]",
              dynamic=True),
        declines(lambda a, b, c: torch.cat([torch.stack([a, b], 1), c], 0), "f32[4]", "f32[4]", "f32[3, 2]"),
        declines(lambda a, b, c: (lambda s: (torch.cat([s, c]), s * 2))(torch.stack([a, b])),
                 "f32[3]", "f32[3]", "f32[4, 3]", because="used elsewhere"),
        declines(lambda a, b, c: torch.cat([torch.stack([a, b]), c]), "i64[3]", "f32[3]", "f64[4, 3]",
                 because="converted"),
        declines(lambda a, b, c: _write_after_stack(a, b, c), "f32[3]", "f32[3]", "f32[4, 3]",
                 dialects=["torch"], because="in between"),
    ]  # fmt: skip


def _stack_operands(value: Any, dim: Any) -> list[Any]:
    call = value.call
    if call is None or call.op != "stack" or call.mutates or call.get("dim") != dim:
        return []
    tensors = call.args["tensors"]
    return list(tensors) if isinstance(tensors, (list, tuple)) else []


def _only_run(m: Match, tensors: Any, in_order: Callable[[Any, str], None] | None = None) -> Run:
    """The run that all operands of a stack are; the site is left alone if they are none."""
    pieces = operand_pieces(m.program, tensors)
    m.applies(len(pieces) > 1 and None not in pieces, "no pieces")
    sources = {(p.source, p.dim, p.single) for p in pieces if p is not None}
    m.applies(len(sources) == 1, "pieces of several values")
    found = runs(pieces)
    (in_order or m.require)(len(found) == 1, "the pieces are not side by side in this order")
    (run,) = found
    assert run is not None
    m.cover(only_used_by(run.nodes, [m.root.node]))
    return run


def _stacked(op: Emitter, run: Run, dim: int) -> Any:
    """The run with the dim that counts its pieces at the place where the stack has it."""
    value = run.build(op)
    known = fact(getattr(value, "node", value))
    shape, rank = list(known.shape), known.dim()
    if not run.single:
        count = len(run.pieces)
        size = run.pieces[0].end - run.pieces[0].start
        value = op.reshape(value, [*shape[: run.dim], count, size, *shape[run.dim + 1 :]])
        rank += 1
    if run.dim == dim:
        return value
    dims = [d for d in range(rank) if d != run.dim]
    return op.permute(value, [*dims[:dim], run.dim, *dims[dim:]])


def _write(x: Any, y: Any) -> Any:
    """For examples: a write that the first value must not see."""
    y.add_(1)
    return x * 2


def _write_after_stack(a: Any, b: Any, c: Any) -> Any:
    stacked = torch.stack([a, b])
    a.add_(1)
    return torch.cat([stacked, c])


RULES: Sequence[Rule] = (StackOfOne(), StackOfPieces(), CopyOfStackedPieces(), StackIntoCat())


@dataclass(frozen=True)
class StackToUnsqueezePass(Pass):
    """Stacks of one value, and of the pieces of one value, are views of it; a stack that goes into a cat
    along the same dim is joined there at once."""

    name: ClassVar[str] = "stack_to_unsqueeze_pass"

    def rules(self) -> Sequence[Rule]:
        return RULES
