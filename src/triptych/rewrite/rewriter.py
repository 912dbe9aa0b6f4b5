"""The only thing that edits graphs.

It checks that a replacement is as good as what it replaces (shape, dtype, device, strides, memory sharing, order of
writes and random draws) and takes a rewrite back whole if it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Node

from ..ir.effects import Effects, node_operands
from ..ir.facts import difference, fact, sharing, storage
from ..ir.program import ATEN, Program, Value
from ..ir.text import RULE
from ..ir.traits import is_gemm, is_pointwise, is_reduction
from .emit import Emitter
from .refusal import Refused
from .spelling import Spelling


class Rewriter:
    """Edits one program; everything it does is counted, and a limit stops it (for bisection)."""

    def __init__(self, program: Program, pass_name: str = "", limit: int | None = None) -> None:
        self.program = program
        self.pass_name = pass_name
        self.limit = limit
        self.rewrites = 0
        self.touched: list[Node] = []
        """Nodes made or given other operands by the last rewrite: what a worklist looks at again."""

    # ---- rewriting ----

    def emitter(self, before: Node, rule: str = "") -> Emitter:
        return Emitter(self.program, before, rule or self.pass_name)

    def replace(
        self,
        old: Node | Sequence[Node],
        new: Any,
        op: Emitter,
        *,
        covered: Iterable[Node] = (),
        keeps_strides: bool = True,
        without_facts: bool = False,
        takes_random: bool = False,
    ) -> None:
        """Put `new` where `old` stands, if that is right; raises Refused and changes nothing if it is not.

        `covered` are the nodes whose work the new value does; those nobody uses any more are erased.
        """
        olds = [old] if isinstance(old, Node) else list(old)
        news = list(new) if isinstance(new, (tuple, list)) else [new]
        covered = tuple(dict.fromkeys((*olds, *covered)))
        try:
            self._check_limit()
            if len(olds) != len(news):
                raise Refused(f"{len(olds)} values replaced by {len(news)}")
            made = [self._node_of(n) for n in news]
            self._check_order(olds, made, covered, op, takes_random)
            for was, now in zip(olds, made):
                self._check_value(was, now, keeps_strides, without_facts)
                self._check_memory(was, now)
        except Exception:
            op.discard()
            raise
        self.rewrites += 1
        self.touched = list(op.made)
        for was, now in zip(olds, made):
            self._swap(was, now)
        self._erase_unused(covered)
        for node in op.made:
            if not node.users and node in self.program.graph.nodes and self.effect_free(node):
                self.erase(node)

    def respell(self, node: Node, spelling: Spelling) -> None:
        """Write the same call another way; the node, its name and its place stay.

        What it makes is computed anew and must be what was known: in shape, dtype, strides, and in what memory it
        shares with its operands. Raises Refused and changes nothing if it is not.
        """
        self._check_limit()
        before = Spelling.of(node)
        seen = self.program.aliasing.effects(node)
        _write(node, spelling)
        try:
            self._check_respelled(node, before, seen)
        except Exception:
            _write(node, before)
            raise
        self.rewrites += 1
        if not before.same_function(spelling):
            node.meta[RULE] = self.pass_name
        self.program.respelled(node)
        self.touched = [node]

    def erase(self, node: Node) -> None:
        """Remove a node that nobody uses."""
        if node.users:
            raise Refused(f"{node.name} is used")
        self.program.erased(node)
        operands = set(node.all_input_nodes)
        self.program.graph.erase_node(node)
        self.touched.extend(operands)

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move a node; that this is right is the caller's to know (see `may_move`)."""
        anchor.prepend(node)

    def set_arguments(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Another spelling of the same arguments."""
        node.args, node.kwargs = args, kwargs
        self.program.changed(node)
        self.touched.append(node)

    def effect_free(self, node: Node) -> bool:
        return node.op not in ("placeholder", "output") and self.program.aliasing.effects(node).pure

    # ---- what must hold ----

    def _check_limit(self) -> None:
        if self.limit is not None and self.rewrites >= self.limit:
            raise Refused("the limit of rewrites is reached")

    def _check_respelled(self, node: Node, before: Spelling, seen: Effects) -> None:
        old = fact(node)
        if old is None or seen.writes or seen.barrier:
            return  # nothing to compare with, or computing it would change the facts themselves
        try:
            new = self.emitter(node).compute(node)
        except Exception as error:
            raise Refused(f"cannot be written so: {type(error).__name__}") from error
        if new is None:
            return
        if problem := difference(old, new):
            raise Refused(problem)
        operands = [fact(n) for n in node_operands((before.args, before.kwargs))]
        if sharing(old, operands) != sharing(new, operands):
            raise Refused("would share other memory than before")

    def _node_of(self, value: Any) -> Node:
        if isinstance(value, Value):
            return value.node
        if isinstance(value, Node):
            return value
        raise Refused(f"a rewrite must return values of the graph, not {type(value).__name__}")

    def _check_order(
        self, olds: list[Node], made: list[Node], covered: tuple[Node, ...], op: Emitter, takes_random: bool
    ) -> None:
        """Nothing between the first covered node and the place of the new ones may write what they read."""
        aliasing = self.program.aliasing
        for node in covered:
            seen = aliasing.effects(node)
            if seen.writes or seen.kept or seen.barrier:
                raise Refused(f"{node.name} has effects of its own")
            if seen.random and not takes_random:
                raise Refused(f"{node.name} draws random numbers")
        place = op.anchor
        first = min(covered)
        if barrier := aliasing.barrier_between(first, place):
            raise Refused(f"{barrier.name} stands between the matched nodes")
        if aliasing.any_write:
            read = {n for c in covered for n in node_operands((c.args, c.kwargs))} | set(covered) | set(made)
            if writer := aliasing.written_between(read, first, place):
                raise Refused(f"{writer.name} writes a matched value in between")
        for user in (u for o in olds for u in o.users):
            if user < place and user not in covered:
                raise Refused(f"{user.name} uses the value before the replacement can stand")

    def _check_value(self, was: Node, now: Node, keeps_strides: bool, without_facts: bool) -> None:
        old, new = fact(was), fact(now)
        if old is None or new is None:
            if not without_facts:
                raise Refused("shape and dtype are not known")
            if not self._strides_unseen(was):
                raise Refused("strides are not known and could be seen")
            return
        if problem := difference(old, new, strides=False):
            raise Refused(problem)
        problem = difference(old, new)
        if problem and (keeps_strides or not self._strides_unseen(was)):
            raise Refused(problem)

    def _strides_unseen(self, node: Node) -> bool:
        """Every user computes the same whatever the strides: no views, no outputs, no unknown kernels."""
        for user in node.users:
            call = self.program.call(user)
            if call is None or not (is_pointwise(call.op) or is_reduction(call.op) or is_gemm(call.op)):
                return False
            if is_pointwise(call.op) and fact(user) is not None and self.program.aliasing.is_output(user):
                return False  # a pointwise result takes over its operand's layout
        return True

    def _check_memory(self, was: Node, now: Node) -> None:
        """No new sharing of memory that a write or a caller could notice, and none lost."""
        aliasing = self.program.aliasing
        if aliasing.same(was, now) and self._same_storage(was, now):
            return
        if aliasing.written(was) or aliasing.written(now):
            raise Refused("memory of the value is written")
        was_shares = aliasing.is_input(was)
        now_leaves = aliasing.is_input(now) or aliasing.is_output(now)
        if aliasing.is_output(was) and (now_leaves or was_shares):
            raise Refused("the value leaves the graph, and would share other memory than before")

    def _same_storage(self, was: Node, now: Node) -> bool:
        """`reshape` and its like may copy: at the torch level the facts tell whether they did."""
        old, new = storage(fact(was)), storage(fact(now))
        return self.program.dialect == ATEN or old is None or new is None or old == new

    # ---- the edit itself ----

    def _swap(self, was: Node, now: Node) -> None:
        users = list(was.users)
        was.replace_all_uses_with(now, propagate_meta=False)
        aliasing = self.program.aliasing
        for user in users:
            self.program.changed(user)
            if user.op == "output":
                aliasing.output_replaced(was, now)
            elif aliasing.effects(user).aliases or aliasing.effects(user).writes:
                aliasing.refresh(user)
        self.touched.extend(users)

    def _erase_unused(self, covered: Iterable[Node]) -> None:
        """Covered nodes, latest first, that the rewrite left without users."""
        for node in sorted(covered, reverse=True):
            if not node.users and not node._erased and self.effect_free(node):
                self.erase(node)


def _write(node: Node, spelling: Spelling) -> None:
    node.op, node.target = spelling.kind, spelling.target
    node.args, node.kwargs = spelling.args, dict(spelling.kwargs)
