"""The only thing that edits graphs.

It checks that a replacement is as good as what it replaces (shape, dtype, device, strides, memory sharing, order of
writes and random draws) and takes a rewrite back whole if it is not.
"""

from __future__ import annotations

import contextlib
import keyword
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from ..ir.effects import Effects, node_operands
from ..ir.facts import difference, fact, set_fact, sharing, tensor_fact
from ..ir.gradients import may_require_grad
from ..ir.program import ATEN, Program, Value
from ..ir.text import RULE
from ..ir.traits import is_gemm, is_pointwise
from .emit import Emitter
from .layout import follow
from .refusal import Refused
from .spelling import Spelling


class Terms(Protocol):
    """What a rewrite says of itself; rules say it as class attributes."""

    @property
    def takes_random(self) -> bool: ...
    @property
    def without_facts(self) -> bool: ...
    @property
    def returns_operand(self) -> bool: ...
    @property
    def keeps_strides(self) -> bool: ...


@dataclass(frozen=True)
class PlainTerms:
    """No random draws, all facts known, strides as they were."""

    takes_random: bool = False
    without_facts: bool = False
    returns_operand: bool = False
    keeps_strides: bool = True


PLAIN = PlainTerms()


@dataclass(frozen=True)
class Edit:
    """One replacement of several: values, what takes their place, who made it, and whose work it does."""

    olds: tuple[Node, ...]
    new: Any
    op: Emitter
    covered: tuple[Node, ...]
    terms: Terms = PLAIN


class Rewriter:
    """Edits one program; everything it does is counted, and a limit stops it (for bisection)."""

    def __init__(self, program: Program, pass_name: str = "", limit: int | None = None) -> None:
        self.program = program
        self.pass_name = pass_name
        self.limit = limit
        self.rewrites = 0
        self.touched: list[Node] = []
        self._relaid: dict[Node, Any] = {}
        """What becomes of values computed from those that lie otherwise in memory than what they replace."""
        """Nodes made or given other operands by the last rewrite: what a worklist looks at again."""

    # ---- rewriting ----

    def emitter(self, before: Node, rule: str = "") -> Emitter:
        return Emitter(self.program, before, rule or self.pass_name)

    def replace(
        self, old: Node | Sequence[Node], new: Any, op: Emitter, covered: Iterable[Node] = (), terms: Terms = PLAIN
    ) -> None:
        """Put `new` where `old` stands, if that is right; raises Refused and changes nothing if it is not.

        `covered` are the nodes whose work the new value does; those nobody uses any more are erased.
        """
        olds = (old,) if isinstance(old, Node) else tuple(old)
        self.replace_all([Edit(olds, new, op, tuple(dict.fromkeys((*olds, *covered))), terms)])

    def replace_all(self, edits: Sequence[Edit]) -> None:
        """Several replacements that hang together, the later built on the earlier: all of them or none."""
        self._relaid = {}
        try:
            self._check_limit(len(edits))
            made = [self.require_sound(e.olds, e.new, e.op, e.covered, e.terms) for e in edits]
        except Exception:
            for edit in reversed(edits):
                edit.op.discard()
            raise
        self.rewrites += len(edits)
        self.touched = [n for e in edits for n in e.op.made]
        for edit, news in zip(edits, made):
            for was, now in zip(edit.olds, news):
                self._swap(was, now)
        for node, value in self._relaid.items():
            set_fact(node, value, self.program.fact_key)
            self.program.respelled(node)
        for edit in reversed(edits):
            self._erase_unused((*edit.covered, *edit.op.made), edit.terms.takes_random)

    def require_sound(
        self, olds: Sequence[Node], new: Any, op: Emitter, covered: tuple[Node, ...], terms: Terms
    ) -> list[Node]:
        """The nodes to put in place, if the rewrite keeps the program's meaning; raises Refused if not."""
        news = list(new) if isinstance(new, (tuple, list)) else [new]
        if len(olds) != len(news):
            raise Refused(f"{len(olds)} values replaced by {len(news)}")
        made = [self._node_of(n) for n in news]
        fresh = set(op.made)
        self._check_order(olds, made, covered, op, terms)
        relaid: dict[Node, Any] = {}
        for was, now in zip(olds, made):
            if terms.returns_operand:
                continue
            if self._check_value(was, now, terms):
                relaid[was] = fact(now)
            self._check_gradient(was, now)
            self._check_memory(was, now, now in fresh)
            if now not in fresh:
                self._check_identity(was, now)
        if relaid:
            self._relaid |= follow(self.program, relaid)
        return made

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

    def write_to_new_memory(self, node: Node, new: Any, op: Emitter) -> None:
        """`x.relu_()` -> `relu(x)`, `x[m] = 0` -> `masked_fill(x, m, 0)`, where x is new memory: who reads x afterwards
        reads the new value."""
        try:
            self._check_limit()
            aliasing = self.program.aliasing
            seen = aliasing.effects(node)
            if seen.random or seen.barrier or len(seen.writes) != 1:  # a write is kept whoever uses it
                raise Refused(f"{node.name} has effects of its own")
            (written,) = seen.writes
            others = [u for u in written.users if u is not node and u not in op.made]
            earlier = [u for u in others if u < node]
            shared = any(written in aliasing.effects(u).writes or self._read_after(written, u, node) for u in earlier)
            if not aliasing.is_fresh(written) or shared:
                raise Refused("others see the memory that is written")
            barrier = aliasing.barrier_between(written, node)
            if barrier is not None and any(may_require_grad(n) for n in node.all_input_nodes):
                raise Refused(f"{barrier.name} stands before the write: autograd may not follow what is made there")
            was = fact(written) if tensor_fact(node) is None else fact(node)  # `x[i] = 0` has no value itself
            if problem := difference(was, fact(self._node_of(new))):
                raise Refused(problem)
        except Exception:
            op.discard()
            raise
        self.rewrites += 1
        self.touched = list(op.made)
        self._swap(node, self._node_of(new))
        self._swap(written, self._node_of(new), [u for u in others if node < u])
        self.erase(node)

    def _read_after(self, source: Node, user: Node, write: Node) -> bool:
        """Is this user a view of the source that is read, itself or through another view, behind a write?"""
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
            raise Refused(f"{node.name} is used")
        self.program.erased(node)
        operands = set(node.all_input_nodes)
        self.program.graph.erase_node(node)
        self.touched.extend(operands)

    def move_before(self, node: Node, anchor: Node) -> None:
        """Move a node; that no write, draw or region is crossed is the caller's to know."""
        anchor.prepend(node)

    def set_arguments(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> None:
        """Another spelling of the same call; nothing is computed, for what it makes is what it made."""
        node.args, node.kwargs = args, kwargs
        if target is not None:
            node.target = target
            node.meta[RULE] = self.pass_name
            self.program.aliasing.refresh(node)
        self.program.changed(node)
        self.touched.append(node)

    # ---- what must hold ----

    def _check_limit(self, more: int = 1) -> None:
        if self.limit is not None and self.rewrites + more > self.limit:
            raise Refused("the limit of rewrites is reached")

    def _check_respelled(self, node: Node, before: Spelling, seen: Effects) -> None:
        old = fact(node)
        if any(map(keyword.iskeyword, node.kwargs)):
            raise Refused("Python has a parameter's name for itself")
        if old is None:
            return
        try:
            new = self.program.compute(node, self._copied_fact if seen.writes else fact)
        except Exception as error:
            raise Refused(f"cannot be written so: {type(error).__name__}") from error
        if new is None:
            return
        if problem := difference(old, new, strides=not seen.writes):  # a copy may lie otherwise
            raise Refused(problem)
        if seen.writes or before.same_function(Spelling.of(node)):
            return
        operands = [fact(n) for n in node_operands((before.args, before.kwargs))]
        if sharing(old, operands) != sharing(new, operands):
            raise Refused("would share other memory than before")

    def _copied_fact(self, node: Node) -> Any:
        """Where a node writes its operands, it must not write what is known of them."""
        value = fact(node)
        if not isinstance(value, torch.Tensor):
            return value
        with self.program.computing(node):
            return value.clone()

    def _node_of(self, value: Any) -> Node:
        if isinstance(value, Value):
            return value.node
        if isinstance(value, Node):
            return value
        raise Refused(f"a rewrite must return values of the graph, not {type(value).__name__}")

    def _check_order(
        self, olds: Sequence[Node], made: list[Node], covered: tuple[Node, ...], op: Emitter, terms: Terms
    ) -> None:
        """Nothing between the first covered node and the place of the new ones may write what they read."""
        aliasing = self.program.aliasing
        for node in covered:
            seen = aliasing.effects(node)
            if seen.writes or seen.kept or seen.barrier:
                raise Refused(f"{node.name} has effects of its own")
            if seen.random and not terms.takes_random:
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

    def _check_value(self, was: Node, now: Node, terms: Terms) -> bool:
        """Is it as good as what it replaces? True where it lies otherwise in memory, which must not be seen."""
        old, new = fact(was), fact(now)
        if old is None or new is None:
            if not terms.without_facts:
                raise Refused("shape and dtype are not known")
            if not self._strides_unseen(was, lambda op: is_pointwise(op) or is_gemm(op)):
                raise Refused("strides are not known and could be seen")
            return False
        if problem := difference(old, new, strides=False):
            raise Refused(problem)
        problem = difference(old, new)
        if problem and terms.keeps_strides:
            raise Refused(problem)
        return problem is not None

    def _check_gradient(self, was: Node, now: Node) -> None:
        """A piece of a joined tensor asks for a gradient if any part of the whole did: so must what replaces it."""
        old = tensor_fact(was)
        if self.program.dialect != ATEN and old is not None and old.requires_grad and not may_require_grad(now):
            raise Refused("the value would ask for no gradient any more")

    def _strides_unseen(self, node: Node, users: Callable[[str], bool]) -> bool:
        """Is every user an operation of that kind, whose result does not tell how this operand lies in memory?"""
        calls = [self.program.call(user) for user in node.users]
        return all(call is not None and users(call.op) for call in calls)

    def _check_memory(self, was: Node, now: Node, is_new: bool) -> None:
        """No new sharing of memory that a write or a caller could notice, and none lost."""
        aliasing = self.program.aliasing
        if aliasing.same(was, now) and self._same_storage(was, now):
            return
        if is_new and aliasing.is_fresh(was) and aliasing.is_fresh(now):
            return  # one new tensor for another: later writes and views follow it
        if aliasing.written(was) or aliasing.written(now):
            raise Refused("memory of the value is written")
        was_shares = aliasing.is_input(was)
        now_leaves = aliasing.is_input(now) or aliasing.is_output(now)
        if aliasing.is_output(was) and (now_leaves or was_shares or self._returned_beside(was)):
            raise Refused("the value leaves the graph, and would share other memory than before")

    def _returned_beside(self, was: Node) -> bool:
        """Is memory of the value also returned by a way that does not go through it?"""
        aliasing = self.program.aliasing
        through, seen = 0, {was}
        work = [was]
        while work:
            node = work.pop()
            for user in node.users:
                if user.op == "output":
                    through += sum(n is node for n in node_operands(user.args))
                elif user not in seen and node in aliasing.effects(user).aliases:
                    seen.add(user)
                    work.append(user)
        return through < aliasing.output_uses(was)

    def _check_identity(self, was: Node, now: Node) -> None:
        """Where a value that was there already takes the place of another: is the difference seen from outside?

        Two tensors the caller gets stay two, and a view of an input is not the input: `y.unsqueeze_(0)` on one of
        them, after the call, must not show in the other. And `y = x * 1` under `no_grad`, used after it, cuts the
        gradient; x in its place would not.
        """
        value = fact(was)
        if value is not None and value is fact(now):
            return  # `x.contiguous()` of a contiguous x is x
        if self._is_returned(was):
            tensor = self._tensor_itself(now)
            given = tensor.op in ("placeholder", "get_attr")
            if tensor is not self._tensor_itself(was) and (given or self._is_returned(tensor)):
                raise Refused(f"the value is returned, and would be the very tensor {tensor.name}")
        if self.program.dialect == ATEN:
            return
        for user in was.users:
            if barrier := self.program.aliasing.barrier_between(was, user):
                raise Refused(f"the value is used beyond {barrier.name}")

    def _tensor_itself(self, node: Node) -> Node:
        """The node that this very tensor comes from: `x.add_(1)`, and `x.contiguous()` of a contiguous x, are x."""
        while True:
            effects, value = self.program.aliasing.effects(node), fact(node)
            in_place = len(effects.writes) == 1 and effects.writes == effects.aliases
            same = [o for o in effects.aliases if in_place or (value is not None and fact(o) is value)]
            if not same:
                return node
            node = same[0]

    def _is_returned(self, node: Node) -> bool:
        """Does the graph return this very tensor, under whatever name?"""
        tensor = self._tensor_itself(node)
        return any(
            user.op == "output" or (self._tensor_itself(user) is tensor and self._is_returned(user))
            for user in node.users
        )

    def _same_storage(self, was: Node, now: Node) -> bool:
        """`reshape` and its like may copy: at the torch level the facts tell whether they did."""
        return self.program.dialect == ATEN or not self.program.aliasing.surely_apart(was, now)

    # ---- the edit itself ----

    def _swap(self, was: Node, now: Node, users: Sequence[Node] | None = None) -> None:
        users = list(was.users) if users is None else users
        for user in users:
            user.replace_input_with(was, now)
        aliasing = self.program.aliasing
        # an ATen graph says by its operations alone who shares memory: there no fact is asked
        by_facts = self.program.dialect != ATEN or self.program.has_composites
        other_memory = by_facts and aliasing.surely_apart(was, now)
        for user in users:
            self.program.changed(user)
            if user.op == "output":
                aliasing.output_replaced(was, now)
            else:
                self._sees_memory_anew(user, other_memory)
        self.touched.extend(users)

    def _sees_memory_anew(self, node: Node, other_memory: bool) -> None:
        """A view of a value that lies elsewhere now lies there too: its fact says whose memory it sees."""
        aliasing = self.program.aliasing
        seen = aliasing.effects(node)
        if not (seen.aliases or seen.writes):
            return
        call = self.program.call(node)
        if other_memory and seen.aliases and call is not None and not (seen.random or call.op.startswith("higher")):
            with contextlib.suppress(Exception):  # the old fact is right in all but the memory
                set_fact(node, self.program.compute(node), self.program.fact_key)
        aliasing.refresh(node)
        if other_memory:
            for user in node.users:
                if user.op != "output":
                    self._sees_memory_anew(user, other_memory)

    def _erase_unused(self, covered: Iterable[Node], takes_random: bool) -> None:
        """Covered nodes, latest first, that the rewrite left without users."""
        for node in sorted(covered, reverse=True):
            if node.users or node._erased or node.op in ("placeholder", "output"):
                continue
            seen = self.program.aliasing.effects(node)
            if seen.pure or (takes_random and not (seen.writes or seen.kept or seen.barrier)):
                self.erase(node)


def _write(node: Node, spelling: Spelling) -> None:
    node.op, node.target = spelling.kind, spelling.target
    node.args, node.kwargs = spelling.args, dict(spelling.kwargs)
