"""Edits of other kinds that a rewrite may return instead of new values. The rewriter performs all of them.

`Respell` and `SetArguments` write a call another way, `Erase` and `EraseUnused` remove nodes that nobody uses, `Move`,
`MoveEach`, `Reorder` and `Arrange` change the order, `WriteInPlace` computes results into existing memory, `ReplaceAll`
makes several replacements that depend on each other, and `Together` combines several edits into one rewrite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from ..ir.facts import set_fact
from .refusal import Refused
from .spelling import Spelling

if TYPE_CHECKING:
    from .emit import Emitter
    from .rewriter import Replacement, Rewriter


class Edit(ABC):
    """One change of the graph that is not the replacement of values by new ones."""

    @abstractmethod
    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        """Edit the graph; raises Refused, and changes nothing, where that would be incorrect.

        `op` is the emitter that was given to the rewrite: it has created the nodes that the edit uses.
        """

    @abstractmethod
    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        """Raise Refused where `make` would, and change nothing; `why_not` calls this."""


class SoundByRule(Edit):
    """An edit that the rewriter never refuses: the rule must ensure that it is correct."""

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        """There is nothing to check here."""


@dataclass(frozen=True)
class Respell(Edit):
    """The same call written another way: the fact of its result is recomputed and must agree with the old one."""

    node: Node
    spelling: Spelling

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.respell(self.node, self.spelling)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_respelled(self.node, self.spelling)


@dataclass(frozen=True)
class SetArguments(SoundByRule):
    """The same call with other arguments or by another overload, where the rule knows that the result stays the same,
    or has the fact `value`."""

    node: Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    value: Any = None

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.set_arguments(self.node, self.args, dict(self.kwargs), target=self.target)
        if self.value is not None:
            set_fact(self.node, self.value, rewriter.program.fact_key)


@dataclass(frozen=True)
class ReadInstead(SoundByRule):
    """Some users of a value read another one, which has the same elements whenever they run."""

    was: Node
    now: Node
    users: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.read_instead(self.was, self.now, self.users)


@dataclass(frozen=True)
class WriteInPlace(SoundByRule):
    """`y = f(x); copy_(x, y); g(y)` -> `f_(x); g(x)`: results that were written into the memory of other values."""

    replaced: Node
    """The node whose work the new nodes do."""
    results: Sequence[tuple[Node, Node]]
    """Pairs: the node itself or the `getitem` of one of its results, and the value that now has the same elements."""
    copies_back: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.write_in_place(self.results, self.copies_back, self.replaced)


@dataclass(frozen=True)
class Resize(SoundByRule):
    """The same operation with other arguments: the result is longer, and its users read the same elements as before."""

    node: Node
    args: tuple[Any, ...]
    shape: Sequence[int]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.set_arguments(self.node, self.args, dict(self.node.kwargs))
        rewriter.resize(self.node, self.shape)


@dataclass(frozen=True)
class Annotate(SoundByRule):
    """Set a meta entry of a node that code generation reads."""

    node: Node
    key: str
    value: Any

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.annotate(self.node, self.key, self.value)


@dataclass(frozen=True)
class TakeOutOfTuple(SoundByRule):
    """`f(x)[0]` -> `f(x)`, where f is a sub-graph with one result and no other call: f returns the result itself."""

    call: Node
    element: Node
    body: GraphModule

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.take_out_of_tuple(self.call, self.element, self.body)


@dataclass(frozen=True)
class ReturnCopy(SoundByRule):
    """Make a called sub-graph return a copy of one of its results; that holds for all of its calls."""

    body: GraphModule
    place: int

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.return_copy(self.body, self.place)


@dataclass(frozen=True)
class Erase(Edit):
    """Erase nodes that no other nodes use. `nodes` lists users before their operands."""

    nodes: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        self.require_sound(rewriter, op)
        for node in self.nodes:
            rewriter.erase(node)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        erased: set[Node] = set()
        for node in self.nodes:
            if (user := next((u for u in node.users if u not in erased), None)) is not None:
                raise Refused("{at} is used, by {found}", at=node, found=user)
            erased.add(node)


@dataclass(frozen=True)
class EraseUnused(SoundByRule):
    """Erase those of the nodes that are dead, and then those of their operands that become dead."""

    nodes: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        work = list(self.nodes)
        while work:
            node = work.pop()
            if not node._erased and rewriter.program.aliasing.is_dead(node):
                work += node.all_input_nodes
                rewriter.erase(node)


@dataclass(frozen=True)
class Move(SoundByRule):
    """Move a node before another. The rule must ensure that it crosses no write, random draw or region."""

    node: Node
    before: Node

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.move_before(self.node, self.before)


@dataclass(frozen=True)
class Reorder(SoundByRule):
    """Several moves, in order, that are correct only as a whole; each counts as a rewrite."""

    moves: Sequence[Move]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room(len(self.moves))
        for move in self.moves:
            move.make(rewriter, op)


@dataclass(frozen=True)
class MoveEach(SoundByRule):
    """Several moves, in order, each of which is a rewrite: a limit may stop after any of them (`Match.one_each`).

    A move is some nodes and the node before which they go.
    """

    moves: Sequence[tuple[Sequence[Node], Node]]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        for nodes, anchor in self.moves:
            if not rewriter.has_room():
                return
            for node in nodes:
                rewriter.move_before(node, anchor)
            rewriter.counted()


@dataclass(frozen=True)
class Arrange(SoundByRule):
    """Put all nodes into another order, the output last. The rule must ensure that the program computes the same."""

    order: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        *others, output = self.order
        for node in others:
            rewriter.move_before(node, output)


@dataclass(frozen=True)
class TakeResults(SoundByRule):
    """`x.add_(1); x.mul_(2); f(x)` -> `a = x.add_(1); b = a.mul_(2); f(b)`: later nodes read the results of the writes,
    which return x itself."""

    written: Node
    writes: Collection[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.take_results(self.written, self.writes)


@dataclass(frozen=True)
class WriteToNewMemory(Edit):
    """`x.relu_()` -> `relu(x)`: nodes that read x after the write read the new value."""

    node: Node
    new: Any

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.write_to_new_memory(self.node, self.new, op)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_new_memory(self.node, self.new, op)


@dataclass(frozen=True)
class ReplaceAll(Edit):
    """Several replacements of which later ones use earlier ones: either all of them are made, or none.

    Each has a separate emitter, created by `op.at`.
    """

    replacements: Sequence[Replacement]
    is_one: bool = False
    """Counts as one rewrite, not as one for each replacement."""

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.replace_all(self.replacements, 1 if self.is_one else len(self.replacements))

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_all_sound(self.replacements)


@dataclass(frozen=True)
class Together(Edit):
    """Several edits that are one rewrite. Only the first may be refused."""

    edits: Sequence[Edit]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        for edit in self.edits:
            edit.make(rewriter, op)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        self.edits[0].require_sound(rewriter, op)
