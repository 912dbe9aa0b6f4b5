"""The general rule for a concatenation of pieces; the split/cat passes are special cases of it."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from ..ir.facts import fact, known_equal, storage
from ..ir.program import Program
from ..rewrite.clones import copied
from ..rewrite.emit import Emitter
from ..rewrite.refusal import Refused
from ..rewrite.rule import FirstOf, Match, Rule
from .blocks import Block, neighbours_joined, progressions_joined
from .gather import GATHER, gathered
from .index_map import product
from .plan import Step, build, plan
from .read import TAKING, Way, only_used_by, way_of

KERNEL = 4
"""The cost of a kernel that reads and writes memory, relative to a view, which costs 1."""
COPYING_STEPS = ("flip", GATHER)
"""Steps of a plan that always copy. A reshape copies only where no view has the shape, which its fact shows."""
NOTHING_SAVED = "nothing is saved: the pieces are used elsewhere, or the replacement takes as many operations"


@dataclass(frozen=True, eq=False)
class Operand:
    """A part of the new concatenation: steps from a source, or an operand that stays as it is."""

    source: Node
    steps: Sequence[Step]
    ways: tuple[Way, ...]
    """The ways of the old operands that it replaces."""


@dataclass(frozen=True, eq=False)
class Form:
    """A possible replacement of a concatenation, with the costs before and after."""

    operands: Sequence[Operand]
    covered: tuple[Node, ...]
    before: int
    after: int

    @property
    def is_one(self) -> bool:
        return len(self.operands) == 1

    @property
    def gathers(self) -> bool:
        """Is the first step an `index_select`?"""
        return any(name == GATHER for operand in self.operands for name, _ in operand.steps)


class PutTogether(Rule, ABC):
    """cat(pieces of x) -> a view of x, a copy of a view, or a cat of fewer operands"""

    joins: ClassVar[tuple[str, ...]] = ("cat", "stack")
    taken: ClassVar[frozenset[str]] = TAKING
    """Operations that take a piece from its source: the way of each piece has at least one of these."""
    between: ClassVar[frozenset[str]] = frozenset()
    """Operations that may be applied to a piece before the concatenation; the result of any other operation is not
    a piece."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """If not empty, at least one of these operations must be applied to a piece."""
    alone: ClassVar[bool | None] = None
    """True: fire only where all operands together are one part of a value; False: only where there are other operands
    too; None: in both cases."""
    whole: ClassVar[bool] = False
    """If all operands together are one part of a value, fire only if that part is the whole value."""
    gathers: ClassVar[bool] = False
    """Rows in arbitrary order become one `index_select`; its index is a constant of the graph."""

    def pattern(self, op, tensors, dim):
        return op.one_of(self.joins, tensors, dim=dim)

    def check(self, m, tensors, dim):
        forms = self.forms(m, tensors, dim)
        for form in forms:
            m.cover(form.covered)
        self.weigh(m, forms[0])

    def weigh(self, m: Match, form: Form) -> None:
        """For a rule that asks the cost model about the cheapest form. A view, a cat of fewer operands or one copy of
        the same bytes is never slower."""

    def rewrite(self, op, tensors, dim, m):
        return FirstOf(*(way for form in self.forms(m, tensors, dim) for way in _ways(op, form, dim, m)))

    def forms(self, m: Match, tensors: Any, dim: Any) -> list[Form]:
        """The replacements that cost less than the concatenation, cheapest first. If there are none, raises Refused
        where the operands were pieces, else NotConcerned."""
        m.applies(isinstance(tensors, (list, tuple)) and len(tensors) > 1 and m.root.known, "fewer than two operands")
        blocks = list(self._blocks(m, tensors, dim))
        pieces = [b for b in blocks if b.ways[0].nodes]
        m.applies(len(pieces) > 1 or pieces == blocks, "the operands are not pieces of a value")
        sources = {b.map.source for b in blocks}
        m.applies(
            len(sources) < len(tensors) and (len(sources) == 1 or not self.alone),
            "the operands are pieces of several values",
        )
        near = neighbours_joined(blocks, dim)
        stacked = dim if m.root.op == "stack" else None
        far = progressions_joined(near, dim)
        forms = [_weighed(m, joined, stacked) for joined in ((near, far) if len(far) < len(near) else (near,))]
        if self.gathers and (steps := gathered(blocks, dim)) is not None:
            ways = tuple(w for b in blocks for w in b.ways)
            forms.append(_weighing(m, [Operand(ways[0].source, steps, ways)]))
        fewer = [f for f in forms if len(f.operands) < len(tensors)]
        m.require(fewer, "the pieces are not side by side in this order, nor at equal distances")
        fitting = [f for f in fewer if f.is_one] if self.alone else fewer
        m.require(fitting, "the pieces together are not one part of the value")
        fitting = [f for f in fitting if not (self.whole and f.is_one) or _is_all(m, f)]
        m.applies(fitting, "a part of the value is left out")
        m.applies(self.alone is not False or not any(f.is_one for f in fitting), "there are no other operands")
        better = [f for f in fitting if f.after < f.before]
        m.require(better, NOTHING_SAVED)
        return sorted(better, key=lambda f: f.after)

    def _blocks(self, m: Match, tensors: Sequence[Any], dim: int) -> Iterator[Block]:
        """One block for each operand; empty operands of a cat are left out."""
        nonempty = [t for t in tensors if m.root.op == "stack" or not _is_empty(t, dim, m.root)]
        for t in nonempty or tensors[:1]:
            way = self.way(m.program, t.node)
            m.applies(way is not None, "the shape of an operand is not known")
            assert way is not None
            target = way.map.unsqueeze(dim) if m.root.op == "stack" else way.map
            yield Block(target, (way,))

    def way(self, program: Program, node: Node) -> Way | None:
        """The way of a piece that this rule handles; any other value is its own source."""
        way = way_of(program, node, self.taken | self.between)
        fits = way is not None and way.ops & self.taken and self.has_needed(way)
        return way if fits else way_of(program, node, frozenset())

    def has_needed(self, way: Way) -> bool:
        return bool(way.ops & self.needs) or not self.needs


def _is_all(m: Match, form: Form) -> bool:
    """Does the result have as many elements as the source?"""
    return known_equal(product(m.root.shape), product(form.operands[0].ways[0].map.sizes))


def _weighed(m: Match, blocks: Sequence[Block], stacked: int | None) -> Form:
    operands = [o for b in blocks for o in _operands(b, stacked, len(blocks) == 1)]
    return _weighing(m, operands)


def _weighing(m: Match, operands: Sequence[Operand]) -> Form:
    covered = tuple(dict.fromkeys(n for o in operands for w in o.ways for n in w.nodes))
    dead = only_used_by(covered, m.root.node)
    before = KERNEL + len(m["tensors"]) + len(dead)
    after = sum(len(o.steps) + (KERNEL if _copies(o) else 0) for o in operands)
    after += KERNEL + len(operands) if len(operands) > 1 else 0
    return Form(operands, tuple(dict.fromkeys((*covered, *dead))), before, after)


def _is_empty(value: Any, dim: int, root: Any) -> bool:
    """Does the operand add no elements to a cat, and not change the dtype of its result?"""
    tensor = value.tensor
    if tensor is None or tensor.dtype != root.dtype:
        return False
    return known_equal(tensor.shape[dim], 0) if tensor.dim() > dim else known_equal(tuple(tensor.shape), (0,))


def _operands(block: Block, stacked: int | None, is_only: bool) -> Iterator[Operand]:
    """A joined block as one operand, if views compute it (or, for the only block, any steps); otherwise the operands
    that it was joined from."""
    steps = plan(block.map) if block.count > 1 or is_only else None
    if steps is not None and (is_only or all(name not in COPYING_STEPS for name, _ in steps)):
        yield Operand(block.map.source, steps, block.ways)
        return
    for way in block.ways:
        node = way.nodes[0] if way.nodes else way.source
        if stacked is None:
            yield Operand(node, [], ())
            continue
        direct = plan(way.map.unsqueeze(stacked)) if way.nodes else None
        if direct is not None and len(direct) <= 1:
            yield Operand(way.source, direct, (way,))
        else:
            yield Operand(node, [("unsqueeze", {"dim": stacked})], ())


def _ways(op: Emitter, form: Form, dim: int, m: Match) -> list[Callable[[], Any]]:
    if form.is_one:
        return [lambda: _view(op, form), lambda: _copy(op, form, m)]
    return [lambda: op.cat([_part(op, operand) for operand in form.operands], dim=dim)]


def _part(op: Emitter, operand: Operand) -> Any:
    value = build(op, operand.source, operand.steps)
    if _is_copy(value, operand):
        sentence = "a part of {at} would have to be copied before it is concatenated with the others"
        raise Refused(sentence, at=operand.source)
    return value


def _view(op: Emitter, form: Form) -> Any:
    (operand,) = form.operands
    value = build(op, operand.source, operand.steps)
    _require_less(form, form.after + (KERNEL if _is_copy(value, operand) and not _copies(operand) else 0))
    return value


def _copy(op: Emitter, form: Form, m: Match) -> Any:
    value = copied(op, _view(op, form), m.root.tensor)
    _require_less(form, form.after + KERNEL + 1)
    return value


def _require_less(form: Form, weight: int) -> None:
    if weight >= form.before:
        raise Refused(NOTHING_SAVED)


def _copies(operand: Operand) -> bool:
    return any(name in COPYING_STEPS for name, _ in operand.steps)


def _is_copy(value: Any, operand: Operand) -> bool:
    """Did one of the steps (a reshape, a flip) have to copy?"""
    return bool(operand.steps) and storage(value.fact) != storage(fact(operand.source))
