"""Alias analysis: which values may share memory, and which nodes write it. All such queries go through this module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import getitem

from torch.fx import Graph, Node

from .calls import Call, read
from .effects import PURE, Effects, effects, node_operands
from .facts import fact, storage
from .positions import Positions


class Aliasing:
    """May-alias classes of the values of one graph, and the nodes that write each class.

    Operations and their schemas say which values may share memory. The storages of the fake values are compared too
    (at the ATen level only those of inputs and of operations that may copy), because inputs may share memory without
    any operation in the graph saying so.
    """

    def __init__(self, graph: Graph, call: Callable[[Node], Call | None] = read) -> None:
        self._call = call
        self._parent: dict[Node, Node] = {}
        self._effects: dict[Node, Effects] = {}
        self._storages: dict[int, tuple[Node, object]] = {}
        self._writers: dict[Node, Positions] = {}
        """The nodes that write each class, keyed by its root; a class that no node writes has no entry."""
        self._every_writer = Positions()
        self._barriers = Positions()
        self._inputs: list[Node] = []
        self._fresh: set[Node] = set()
        self._input_classes: set[Node] = set()
        self._output_uses: Counter[Node] = Counter()
        self._pieces: dict[tuple[object, object], Node] = {}
        self._several: dict[Node, bool] = {}
        self.joined: list[tuple[Node, Node]] = []
        """Every merge of two classes, in order: the merged root and the root that remains. Callers that store data by
        class need it to update their keys."""
        for node in graph.nodes:
            self.add(node)
        if self.any_write and any(fact(n) is None for n in self._inputs):
            self._join(self._inputs)  # inputs without facts may be the same tensor

    def add(self, node: Node) -> None:
        """Take a new node into account."""
        if node in self._effects:
            return
        seen = effects(node, self._call)
        self._effects[node] = seen
        self._parent.setdefault(node, node)
        if seen is PURE and node.op == "call_function" and "val" in node.meta and node.target is not getitem:
            self._fresh.add(node)  # most nodes of an ATen graph: a new value in memory of its own
            return
        shared = self._shared_with(node, seen)
        if shared:
            self._join((node, *shared))
        elif not seen.writes and node.op not in ("placeholder", "get_attr"):
            self._fresh.add(node)
        if node.op in ("placeholder", "get_attr"):
            self._inputs.append(node)
            self._input_classes.add(self._root(node))
        elif node.op == "output":
            self._output_uses.update(self._root(n) for n in node_operands(node.args))
        if seen.writes or seen.barrier:
            self._place(node, seen)
        if "val" not in node.meta or seen.may_copy or node.op == "placeholder":
            self._join_by_storage(node)

    def _shared_with(self, node: Node, seen: Effects) -> list[Node]:
        if node.target is getitem and self._makes_several(node.args[0]):
            first = self._pieces.setdefault((node.args[0], node.args[1]), node)
            return [first] if first is not node else []
        return [a for a in seen.aliases if not (seen.may_copy and self.surely_apart(node, a))]

    def _makes_several(self, node: object) -> bool:
        """Does the node return several results, each in new memory, that are only read through `getitem`? Then the
        results do not alias each other."""
        if not isinstance(node, Node) or node not in self._effects:
            return False
        if node not in self._several:
            self._several[node] = (
                node.op != "placeholder"
                and not self._effects[node].aliases
                and isinstance(fact(node), (list, tuple, dict))
                and all(u.target is getitem and isinstance(u.args[1], (int, str)) for u in node.users)
            )
        return self._several[node]

    def forget(self, node: Node) -> None:
        """Remove the writes of an erased node. Its alias class stays, which is conservative."""
        seen = self._effects.pop(node, None)
        self._fresh.discard(node)
        if seen is None:
            return
        if seen.writes or seen.barrier:
            self._displace(node, seen)

    def _place(self, node: Node, seen: Effects) -> None:
        """Note where a node writes, and where it begins or ends a region."""
        for target in seen.writes:
            self._writers.setdefault(self._root(target), Positions()).add(node)
        if seen.writes:
            self._every_writer.add(node)
        if seen.barrier:
            self._barriers.add(node)

    def _displace(self, node: Node, seen: Effects) -> None:
        for root in {self._root(target) for target in seen.writes}:
            writers = self._writers.get(root)
            if writers is not None:
                writers.remove(node)
                if not writers:
                    del self._writers[root]
        self._every_writer.remove(node)
        self._barriers.remove(node)

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move a node. Writes and region bounds are indexed by graph position, so the node's are removed before the
        move and added again after it."""
        seen = self.effects(node)
        indexed = seen.writes or seen.barrier
        if indexed:
            self._displace(node, seen)
        anchor.prepend(node)
        if indexed:
            self._place(node, seen)

    def refresh(self, node: Node) -> None:
        """Recompute the effects of a node whose operands have changed: it may alias and write other memory now."""
        self.forget(node)
        self.add(node)

    def effects(self, node: Node) -> Effects:
        return self._effects[node] if node in self._effects else effects(node, self._call)

    @property
    def any_write(self) -> bool:
        return bool(self._every_writer)

    def is_fresh(self, node: Node) -> bool:
        """Is the value new memory, shared with nothing that was there before?"""
        return node in self._fresh

    def surely_apart(self, left: Node, right: Node) -> bool:
        """Are the storages of both values known, and different?"""
        first, second = storage(fact(left)), storage(fact(right))
        return first is not None and second is not None and first != second

    def is_dead(self, node: Node, draws_may_go: bool = False) -> bool:
        """Does nobody use the value, and would nobody notice if its node were erased?

        A random draw stays, because it advances a generator, which changes later draws, unless the caller's
        rewrite does the work of the draw (`draws_may_go`).
        """
        if node.users or node.op in ("placeholder", "output"):
            return False
        seen = self.effects(node)
        return seen.pure or (draws_may_go and seen.only_draws)

    def count_as_shared(self, left: Node, right: Node) -> None:
        """Let two values count as sharing memory, for a rule that knows more than schemas say."""
        self._join((left, right))

    def same(self, left: Node, right: Node) -> bool:
        """May the two share memory?"""
        return self._root(left) is self._root(right)

    def memory(self, node: Node) -> Node:
        """A key for the memory of a value: values that may share memory have the same key."""
        return self._root(node)

    def written(self, node: Node) -> bool:
        """Does anything in the graph write memory that this value may share?"""
        return bool(self._writers) and self._root(node) in self._writers

    def first_writer(self, *nodes: Node) -> Node | None:
        """A node that writes memory which one of these values may share."""
        written = next((n for n in nodes if self.written(n)), None)
        return None if written is None else next(iter(self._writers[self._root(written)]))

    def writers(self, node: Node) -> Sequence[Node]:
        """The nodes that write memory which this value may share."""
        return tuple(self._writers[self._root(node)]) if self.written(node) else ()

    def written_between(self, values: Iterable[Node], first: Node, last: Node) -> Node | None:
        """The first node from `first` up to but excluding `last` that writes memory which a value may share."""
        if not self._writers:
            return None
        writers = (self._writers.get(root) for root in {self._root(v) for v in values})
        nearest = (next(w.between(first, last), None) for w in writers if w is not None)
        return min((n for n in nearest if n is not None), default=None)

    def memory_written_between(self, first: Node, last: Node) -> Iterator[tuple[Node, Node]]:
        """Every write from `first` up to but excluding `last`: the node, and the key of the memory that it writes."""
        for writer in self._every_writer.between(first, last):
            yield from ((writer, self._root(target)) for target in self._effects[writer].writes)

    def barrier_between(self, first: Node, last: Node) -> Node | None:
        return next((b for b in self._barriers.between(first, last) if b is not first), None)

    def is_input(self, node: Node) -> bool:
        """May the value share memory with an input or an attribute?"""
        return self._root(node) in self._input_classes

    def is_output(self, node: Node) -> bool:
        """May memory of this value leave the graph?"""
        return self._output_uses[self._root(node)] > 0

    def output_uses(self, node: Node) -> int:
        """How many of the returned values may share memory with this one."""
        return self._output_uses[self._root(node)]

    def output_replaced(self, old: Node, new: Node) -> None:
        """The graph returns `new` where it returned `old`."""
        self._output_uses[self._root(old)] -= 1
        self._output_uses[self._root(new)] += 1

    def _root(self, node: Node) -> Node:
        parent = self._parent
        parent.setdefault(node, node)
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def _join(self, nodes: Iterable[Node]) -> None:
        """Merge several classes; the result has the writers, inputs and outputs of all of them."""
        first: Node | None = None
        for node in nodes:
            root = self._root(node)
            if first is None or root is first:
                first = root
                continue
            self._parent[root] = first
            self.joined.append((root, first))
            if (writers := self._writers.pop(root, None)) is not None:
                if first in self._writers:
                    writers.update(self._writers[first])
                self._writers[first] = writers
            if root in self._input_classes:
                self._input_classes.add(first)
            if uses := self._output_uses.pop(root, 0):
                self._output_uses[first] += uses

    def _join_by_storage(self, node: Node) -> None:
        value = fact(node)
        if self._makes_several(node):
            return
        for item in value if isinstance(value, (list, tuple)) else (value,):
            key = storage(item)
            if key is not None:  # storing the value keeps its storage alive: no other gets the same key
                self._join((self._storages.setdefault(key, (node, item))[0], node))
