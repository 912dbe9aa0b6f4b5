"""What a rewrite may return instead of new values: an edit of another kind. The rewriter makes all of them.

`Respell` and `SetArguments` write a call another way, `Erase` and `EraseUnused` remove nodes that nobody uses, `Move`,
`Reorder` and `Arrange` change the order, `WriteInPlace` computes results into memory that is there, `ReplaceAll` makes
several replacements that hang together, and `Together` makes several edits one rewrite.
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
        """Edit the graph; raises Refused, and changes nothing, where that would not be right.

        `op` is the emitter that was given to the rewrite: it has made the nodes that the edit uses.
        """

    @abstractmethod
    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        """Raise Refused where `make` would, and change nothing: what `why_not` asks."""


class SoundByRule(Edit):
    """An edit that the rewriter never refuses: that it is right is for the rule to know."""

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        """There is nothing to check here."""


@dataclass(frozen=True)
class Respell(Edit):
    """The same call written another way: its result is computed anew and must be what was known."""

    node: Node
    spelling: Spelling

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.respell(self.node, self.spelling)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_respelled(self.node, self.spelling)


@dataclass(frozen=True)
class SetArguments(SoundByRule):
    """The same call with other arguments or by another overload, where the result is known to stay what it was, or to
    become what `value` says."""

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
    """Some users of a value read another one, which holds the same whenever they run."""

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
    """The node whose work the new ones do."""
    results: Sequence[tuple[Node, Node]]
    """The node itself or those that take one of its results, and the values that hold the same now."""
    copies_back: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.write_in_place(self.results, self.copies_back, self.replaced)


@dataclass(frozen=True)
class Resize(SoundByRule):
    """The same operation with other arguments: a longer result, of which its users read what they read before."""

    node: Node
    args: tuple[Any, ...]
    shape: Sequence[int]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.set_arguments(self.node, self.args, dict(self.node.kwargs))
        rewriter.resize(self.node, self.shape)


@dataclass(frozen=True)
class Annotate(SoundByRule):
    """What code generation is told of a node beside its arguments."""

    node: Node
    key: str
    value: Any

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.annotate(self.node, self.key, self.value)


@dataclass(frozen=True)
class TakeOutOfTuple(SoundByRule):
    """`f(x)[0]` -> `f(x)`, where f is a graph of one result that nobody else calls: f returns the result itself."""

    call: Node
    element: Node
    body: GraphModule

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.take_out_of_tuple(self.call, self.element, self.body)


@dataclass(frozen=True)
class ReturnCopy(SoundByRule):
    """A graph that is called returns a copy of one of its results, wherever it is called."""

    body: GraphModule
    place: int

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.return_copy(self.body, self.place)


@dataclass(frozen=True)
class Erase(Edit):
    """Nodes that nobody uses, or only each other: users before their operands."""

    nodes: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        self.require_sound(rewriter, op)
        for node in self.nodes:
            rewriter.erase(node)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        gone: set[Node] = set()
        for node in self.nodes:
            if (user := next((u for u in node.users if u not in gone), None)) is not None:
                raise Refused("{at} is used, by {found}", at=node, found=user)
            gone.add(node)


@dataclass(frozen=True)
class EraseUnused(SoundByRule):
    """Those of the nodes that nobody uses any more and nothing can notice, and then what nobody but they used."""

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
    """A node put before another. That no write, draw or region is crossed is for the rule to know."""

    node: Node
    before: Node

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room()
        rewriter.move_before(self.node, self.before)


@dataclass(frozen=True)
class Reorder(SoundByRule):
    """Several moves, in turn, that are right only as a whole; each counts as a rewrite."""

    moves: Sequence[Move]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_room(len(self.moves))
        for move in self.moves:
            move.make(rewriter, op)


@dataclass(frozen=True)
class Arrange(SoundByRule):
    """All nodes in another order, the output last. That it computes the same is for the rule to know."""

    order: Sequence[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        *others, output = self.order
        for node in others:
            rewriter.move_before(node, output)


@dataclass(frozen=True)
class TakeResults(SoundByRule):
    """`x.add_(1); x.mul_(2); f(x)` -> `a = x.add_(1); b = a.mul_(2); f(b)`: writes that return x itself."""

    written: Node
    writes: Collection[Node]

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.take_results(self.written, self.writes)


@dataclass(frozen=True)
class WriteToNewMemory(Edit):
    """`x.relu_()` -> `relu(x)`: whoever reads x after the write reads the new value."""

    node: Node
    new: Any

    def make(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.write_to_new_memory(self.node, self.new, op)

    def require_sound(self, rewriter: Rewriter, op: Emitter) -> None:
        rewriter.require_new_memory(self.node, self.new, op)


@dataclass(frozen=True)
class ReplaceAll(Edit):
    """Several replacements that hang together, the later built on the earlier: all of them or none.

    Each has an emitter of its own, made by `op.at`.
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
