"""The rewriter: nothing else edits graphs.

It checks that a replacement is equivalent to the value it replaces (shape, dtype, device, strides, memory sharing,
order of writes and random draws) and undoes the whole rewrite if it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..ir.effects import returned_operand
from ..ir.facts import difference, fact, same_strides, set_fact, storage, tensor_fact, update_fact
from ..ir.gradients import may_require_grad
from ..ir.program import ATEN, Program
from ..ir.text import RULE
from .checks import PLAIN, Checks, Terms
from .edits import Edit
from .emit import Emitter
from .layout import follow, require_same_place
from .refusal import Refused
from .spelling import Spelling
from .view_facts import views_moved

MOST_WRITES = 64
"""Limit for writes to one memory by calls without a result, such as `x[m] = 0`. A write that is replaced by a new value
changes all later users of x. Where there are more writes, they stay in place, which keeps the work linear."""


@dataclass(frozen=True)
class Replacement:
    """One of several replacements: the old values, the new ones, the emitter that created them, and the nodes whose
    work they do."""

    olds: tuple[Node, ...]
    new: Any
    op: Emitter
    covered: tuple[Node, ...]
    terms: Terms = PLAIN


class Rewriter(Checks):
    """Edits one program. The driver counts each rewrite, which may consist of several edits; a limit stops it.

    A rewrite that would exceed the limit is refused, and so is every later one: with a limit of n, the graph is the
    result of the first n rewrites. A bisection relies on this.
    """

    def __init__(self, program: Program, pass_name: str = "", limit: int | None = None) -> None:
        self.program = program
        self.pass_name = pass_name
        self.limit = limit
        self.rewrites = 0
        """How many rewrites are done and counted."""
        self.edited = False
        """Something in the graph was changed, counted or not."""
        self.stopped = False
        """The limit has refused a rewrite."""
        self.touched: list[Node] = []
        """Nodes that the last rewrite created or gave other operands: a worklist visits them again."""
        self._relaid: dict[Node, Any] = {}
        """New facts of downstream values whose strides change because a replacement has different strides."""

    # ---- rewriting ----

    def emitter(self, before: Node, rule: str = "") -> Emitter:
        return Emitter(self.program, before, rule or self.pass_name)

    def replace(
        self, old: Node | Sequence[Node], new: Any, op: Emitter, covered: Iterable[Node] = (), terms: Terms = PLAIN
    ) -> None:
        """Replace `old` by `new` if that is sound; raises Refused and changes nothing if it is not.

        `covered` are the nodes whose work the new value does; those nobody uses any more are erased.
        """
        olds = (old,) if isinstance(old, Node) else tuple(old)
        self.replace_all([Replacement(olds, new, op, tuple(dict.fromkeys((*olds, *covered))), terms)], 1)

    def replace_all(self, edits: Sequence[Replacement], rewrites: int) -> None:
        """Several replacements of which later ones use earlier ones: either all of them are made, or none. `rewrites`
        is how many rewrites they count as."""
        self._relaid = {}
        try:
            self.require_room(rewrites)
            new_nodes = self._require_all_sound(edits)
        except Exception:
            for edit in reversed(edits):
                edit.op.discard()
            raise
        self.edited = True
        self.touched = [n for e in edits for n in e.op.made]
        for edit, news in zip(edits, new_nodes):
            for was, now in zip(edit.olds, news):
                self._swap(was, now)
        for node, value in self._relaid.items():
            update_fact(node, value, self.program.fact_key)
            self.program.respelled(node)
        for edit in reversed(edits):
            self.erase_unused((*edit.covered, *edit.op.made), edit.terms.takes_random)

    def install(self, result: Any, old: Sequence[Node], op: Emitter, covered: Iterable[Node], terms: Terms) -> None:
        """Apply what a rewrite returned to the graph: new values for the old ones, or an edit of another kind."""
        if isinstance(result, Edit):
            result.make(self, op)
        else:
            self.replace(old, result if isinstance(result, (tuple, list)) else (result,), op, covered, terms)

    def require_sound(
        self, result: Any, old: Sequence[Node], op: Emitter, covered: Iterable[Node], terms: Terms
    ) -> None:
        """Raises Refused where `install` would, and changes nothing."""
        if isinstance(result, Edit):
            result.require_sound(self, op)
        else:
            self.require_all_sound([Replacement(tuple(old), result, op, tuple(covered), terms)])

    def require_all_sound(self, edits: Sequence[Replacement]) -> None:
        """Raises Refused where `replace_all` would, and changes nothing."""
        self._require_all_sound(edits)
        self._relaid = {}

    def _require_all_sound(self, edits: Sequence[Replacement]) -> list[list[Node]]:
        """The new nodes of each replacement; raises Refused if one is not sound."""
        new_nodes = [self._require_sound(e.olds, e.new, e.op, e.covered, e.terms) for e in edits]
        self._check_gradients([(e.olds, news, e.op) for e, news in zip(edits, new_nodes)])
        return new_nodes

    def _require_sound(
        self, olds: Sequence[Node], new: Any, op: Emitter, covered: tuple[Node, ...], terms: Terms
    ) -> list[Node]:
        """The new nodes; raises Refused if the replacement is not sound. Gradients are not checked here."""
        news = list(new) if isinstance(new, (tuple, list)) else [new]
        if len(olds) != len(news):
            raise Refused("{wanted} values replaced by {found}", wanted=len(olds), found=len(news))
        new_nodes = [self._node_of(n) for n in news]
        fresh = set(op.made)
        self._check_order(olds, new_nodes, covered, op, terms)
        relaid: dict[Node, Any] = {}
        for was, now in zip(olds, new_nodes):
            if returned_operand(self.program.call(was)) is now:
                continue  # the same tensor, even if nothing is known about it
            if self._check_value(was, now, terms):
                relaid[was] = fact(now)
            self._check_memory(was, now, now in fresh)
            self._check_saved(was, now, op.made)
            self._check_results(was, covered)
            require_same_place(self.program, was, now)
            if now not in fresh:
                self._check_identity(was, now)
        if relaid:
            self._relaid |= follow(self.program, relaid)
        for was, now in zip(olds, new_nodes):
            self._check_offset(was, now)
        return new_nodes

    def respell(self, node: Node, spelling: Spelling) -> None:
        """Write the same call another way; the node, its name and its position stay.

        The fact of the result is recomputed and must agree with the old one: in shape, dtype, strides, and in the
        memory that it shares with its operands. Raises Refused and changes nothing if it does not.
        """
        self.require_room()
        before = Spelling.of(node)
        seen = self.program.aliasing.effects(node)
        _write(node, spelling)
        try:
            relaid = self._check_respelled(node, before, seen)
        except Exception:
            _write(node, before)
            raise
        self.edited = True
        if not before.same_function(spelling):
            node.meta[RULE] = self.pass_name
        for other, value in relaid.items():
            update_fact(other, value, self.program.fact_key)
        self.program.respelled(node)
        self.touched = [node]

    def require_respelled(self, node: Node, spelling: Spelling) -> None:
        """Raises Refused where `respell` would, and changes nothing."""
        before = Spelling.of(node)
        seen = self.program.aliasing.effects(node)
        _write(node, spelling)
        try:
            self._check_respelled(node, before, seen)
        finally:
            _write(node, before)

    def take_results(self, written: Node, writes: Collection[Node]) -> None:
        """`x.add_(1); x.mul_(2); f(x)` -> `a = x.add_(1); b = a.mul_(2); f(b)`: later nodes read the results of the
        writes, which return x itself."""
        self.require_room()
        latest = written
        touched = []
        for user in sorted(written.users):
            if latest is not written:
                self._swap(written, latest, [user])
                touched.append(user)
            if user in writes:
                latest = user
        self.edited = True
        self.touched = touched

    def write_to_new_memory(self, node: Node, new: Any, op: Emitter) -> None:
        """`x.relu_()` -> `relu(x)`, `x[m] = 0` -> `masked_fill(x, m, 0)`, where x is new memory: nodes that read x
        afterwards read the new value."""
        try:
            self.require_room()
            self.require_new_memory(node, new, op)
        except Exception:
            op.discard()
            raise
        (written,) = self.program.aliasing.effects(node).writes
        later = [u for u in written.users if node < u and u not in op.made]
        self.edited = True
        self.touched = list(op.made)
        # later writes get here next: the facts of the views after them are updated then
        self._swap(node, self._node_of(new), past_writes=False)
        self._swap(written, self._node_of(new), later, past_writes=False)
        self.erase(node)

    def require_new_memory(self, node: Node, new: Any, op: Emitter) -> None:
        """Raises Refused where `write_to_new_memory` would, and changes nothing."""
        aliasing = self.program.aliasing
        seen = aliasing.effects(node)
        if seen.random or seen.barrier or len(seen.writes) != 1:  # `kept` does not matter for a write
            raise Refused("{at} has side effects", at=node)
        (written,) = seen.writes
        if tensor_fact(node) is None and (times := len(aliasing.writers(written))) > MOST_WRITES:
            sentence = "the memory is written more than {wanted} times"
            raise Refused(sentence, at=written, wanted=MOST_WRITES, found=times)
        earlier = [u for u in written.users if u < node and u not in op.made]
        shared = (u for u in earlier if written in aliasing.effects(u).writes or self._read_after(written, u, node))
        if not aliasing.is_fresh(written):
            raise Refused("others see the memory that is written", at=written)
        if (observer := next(shared, None)) is not None:
            raise Refused("others see the memory that is written: {at}", at=observer)
        barrier = aliasing.barrier_between(written, node)
        if barrier is not None and any(may_require_grad(n) for n in node.all_input_nodes):
            raise Refused("{at} comes before the write: autograd may not record what is computed there", at=barrier)
        was = fact(written) if tensor_fact(node) is None else fact(node)  # `x[i] = 0` has no value itself
        now = fact(self._node_of(new))
        if problem := difference(was, now):
            raise Refused(problem.blaming(node))
        if not same_strides(was, now):
            raise Refused("the stride of a dim of size 1 would change", at=node)
        if problem := self.program.gradient_paths.problem([(node, self._node_of(new))], op.made, is_write=True):
            raise Refused(problem)

    def _read_after(self, source: Node, user: Node, write: Node) -> bool:
        """Is this user a view of the source that is read, itself or through another view, after the write?"""
        work, sources = [user], {source}
        while work:
            view = work.pop()
            if sources.isdisjoint(self.program.aliasing.effects(view).aliases):
                continue
            if any(write < u for u in view.users):
                return True
            sources.add(view)
            work += view.users
        return False

    def erase(self, node: Node) -> None:
        """Remove a node that nobody uses."""
        if node.users:
            raise Refused("{at} is used, by {found}", at=node, found=next(iter(node.users)))
        self.edited = True
        self.program.erased(node)
        operands = set(node.all_input_nodes)
        self.program.graph.erase_node(node)
        self.touched.extend(operands)

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move a node; the caller must ensure that it crosses no write, random draw or region."""
        self.edited = True
        self.program.move_before(node, anchor)

    def set_arguments(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> None:
        """Another spelling of the same call; its fact is not recomputed, because the result stays the same."""
        self.edited = True
        node.args, node.kwargs = args, kwargs
        self.program.changed(node)
        if target is not None:
            node.target = target
            node.meta[RULE] = self.pass_name
            self.program.aliasing.refresh(node)
        self.touched.append(node)

    def add_input(self, name: str, value: Any) -> Node:
        """Add an input after the existing ones."""
        graph = self.program.graph
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            node = graph.placeholder(name)
        self.edited = True
        set_fact(node, value, self.program.fact_key)
        self.program.added(node)
        return node

    def read_instead(self, was: Node, now: Node, users: Sequence[Node]) -> None:
        """Let some users of a value read another one; the caller must ensure that it has the same elements."""
        self.edited = True
        self._swap(was, now, users)

    def write_in_place(
        self, results: Sequence[tuple[Node, Node]], copies_back: Sequence[Node], replaced: Node
    ) -> None:
        """Erase a node whose results are now in the memory of other values: users of a result read that value instead.

        Copies of a result into that same memory are erased too. The caller must ensure that no difference is visible.
        """
        self.edited = True
        for was, now in results:
            self.program.aliasing.count_as_shared(was, now)
            self._swap(was, now)
        for copy in copies_back:
            target: Any = copy.args[0]
            self._swap(copy, target)
            self.erase(copy)
            self.erase_unused([target])
        for was, _ in results:
            if was is not replaced:
                self.erase(was)
        self.erase(replaced)

    def resize(self, node: Node, shape: Sequence[int]) -> None:
        """Give the fact of a result another shape, with the same dtype and device; the operation is not recomputed."""
        if (known := tensor_fact(node)) is None:
            return
        value = self.program.fact_memo.in_shape(known, shape)
        if value is None:
            with self.program.computing(node):
                value = known.new_empty(shape)
        set_fact(node, value, self.program.fact_key)

    def annotate(self, node: Node, key: str, value: Any) -> None:
        """Set a meta entry of a node that code generation reads."""
        self.edited = True
        node.meta[key] = value

    def take_out_of_tuple(self, call: Node, element: Node, body: GraphModule) -> None:
        """Make a called sub-graph return its only result itself instead of a tuple of it."""
        (end,) = body.graph.find_nodes(op="output")
        ((result,),) = end.args
        end.args = (result,)
        body.recompile()
        self.edited = True
        set_fact(call, fact(element), self.program.fact_key)
        self.program.respelled(call)
        self._swap(element, call)
        self.erase(element)

    def return_copy(self, body: GraphModule, place: int) -> None:
        """Make a called sub-graph return a copy of one of its results."""
        end = body.graph.output_node()
        results: Any = end.args[0]
        with body.graph.inserting_before(end):
            copied = body.graph.call_function(torch.ops.aten.clone.default, (results[place],))
        copied.meta = dict(results[place].meta)
        end.args = ((*results[:place], copied, *results[place + 1 :]),)
        body.recompile()
        self.edited = True

    # ---- counting ----

    def counted(self, rewrites: int = 1) -> None:
        """Count a finished rewrite, or several that are one step: the edits since the last one belong to it."""
        self.rewrites += rewrites

    def has_room(self, rewrites: int = 1) -> bool:
        """Does the limit allow another rewrite, or several that are one step? Once it does not, it never does again."""
        self.stopped |= self.limit is not None and self.rewrites + rewrites > self.limit
        return not self.stopped

    def require_room(self, rewrites: int = 1) -> None:
        if not self.has_room(rewrites):
            raise Refused("the limit of rewrites is reached")

    # ---- the edit itself ----

    def _swap(
        self, was: Node, now: Node, users: Sequence[Node] | None = None, past_writes: bool = True
    ) -> None:
        users = list(was.users) if users is None else users
        for user in users:
            user.replace_input_with(was, now)
        aliasing = self.program.aliasing
        # in an ATen graph the operations alone say which values share memory: facts are not consulted
        by_facts = self.program.dialect != ATEN or self.program.has_composites
        left = storage(fact(was)) if by_facts and aliasing.surely_apart(was, now) else None
        for user in users:
            self.program.changed(user)
            if user.op == "output":
                aliasing.output_replaced(was, now)
            else:
                views_moved(self.program, user, left, past_writes)
        self.touched.extend(users)

    def erase_unused(self, nodes: Iterable[Node], takes_random: bool = False) -> None:
        """Erase those of the nodes, latest first, that a rewrite left dead."""
        for node in sorted((n for n in nodes if not n._erased), reverse=True):
            if not node._erased and self.program.aliasing.is_dead(node, draws_may_go=takes_random):
                self.erase(node)


def _write(node: Node, spelling: Spelling) -> None:
    node.op, node.target = spelling.kind, spelling.target
    node.args, node.kwargs = spelling.args, dict(spelling.kwargs)
