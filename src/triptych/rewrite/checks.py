"""What must hold for a rewrite to keep the meaning of the program; a check that fails raises Refused."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from ..ir.effects import Effects, node_operands
from ..ir.facts import difference, fact, known_equal, same_strides, sharing, symbols_would_merge
from ..ir.operations import with_trait
from ..ir.partitioned import returns_gradients
from ..ir.program import ATEN, Program, Value
from ..ir.traits import is_gemm, is_pointwise
from .emit import Emitter
from .layout import follow
from .refusal import Refused
from .spelling import Spelling


class Terms(Protocol):
    """What a rewrite declares about itself; rules declare it as class attributes."""

    @property
    def takes_random(self) -> bool: ...
    @property
    def without_facts(self) -> bool: ...


@dataclass(frozen=True)
class _Plain:
    """No random draws, all facts known."""

    takes_random: bool = False
    without_facts: bool = False


PLAIN = _Plain()


SAVED_FOR_BACKWARD = with_trait("saves_result")


def _is_given(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class Checks:
    """The checks that the rewriter makes before it edits; they only read the program."""

    program: Program

    def _check_respelled(self, node: Node, before: Spelling, seen: Effects) -> dict[Node, Any]:
        """The new facts of values whose strides change; only the strides of size-1 dims may."""
        old = fact(node)
        if any(map(keyword.iskeyword, node.kwargs)):
            raise Refused("the name of a parameter is a Python keyword", at=node)
        if old is None:
            return {}
        try:
            new = self.program.compute(node, self._copied_fact if seen.writes else fact)
        except Exception as error:
            raise Refused(f"the call cannot be written this way: {type(error).__name__}", at=node) from error
        if new is None:
            return {}
        if problem := difference(old, new, strides=not seen.writes):  # a copy may have other strides
            raise Refused(problem.blaming(node))
        if seen.writes or before.same_function(Spelling.of(node)):
            return {}
        operands = [fact(n) for n in node_operands((before.args, before.kwargs))]
        if sharing(old, operands) != sharing(new, operands):
            raise Refused("the result would share other memory than before", at=node)
        return {} if same_strides(old, new) else {node: new, **follow(self.program, {node: new})}

    def _copied_fact(self, node: Node) -> Any:
        """A copy of a fact, for a node that writes its operands: computing it must not change the facts themselves."""
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
        wanted = "values of the graph"
        raise Refused("a rewrite must return {wanted}, not {found}", wanted=wanted, found=type(value).__name__)

    def _check_order(
        self, olds: Sequence[Node], new_nodes: list[Node], covered: tuple[Node, ...], op: Emitter, terms: Terms
    ) -> None:
        """No node between the first covered node and the position of the new ones may write a value that they read."""
        aliasing = self.program.aliasing
        for node in covered:
            seen = aliasing.effects(node)
            if seen.writes or seen.kept or seen.barrier:
                raise Refused("{at} has side effects", at=node)
            if seen.random and not terms.takes_random:
                raise Refused("{at} draws random numbers", at=node)
        place = op.anchor
        first = min(covered)
        if barrier := aliasing.barrier_between(first, place):
            raise Refused("{at} stands between the matched nodes", at=barrier)
        if aliasing.any_write:
            read = {n for c in covered for n in node_operands((c.args, c.kwargs))} | set(covered) | set(new_nodes)
            if writer := aliasing.written_between(read, first, place):
                raise Refused("{at} writes a matched value in between", at=writer)
        for user in (u for o in olds for u in o.users):
            if user < place and user not in covered:
                raise Refused("{at} uses the value before the replacement can be computed", at=user)

    def _check_value(self, was: Node, now: Node, terms: Terms) -> bool:
        """Raises Refused unless shape, dtype and device are the same. Returns whether the strides differ, which
        `follow` examines further."""
        old, new = fact(was), fact(now)
        if old is None or new is None:
            if not terms.without_facts:
                raise Refused("shape and dtype are not known", at=was)
            if observer := self._strides_seen(was, lambda op: is_pointwise(op) or is_gemm(op)):
                raise Refused("strides are not known, and {found} may depend on them", at=was, found=observer)
            return False
        if problem := difference(old, new, strides=False):
            raise Refused(problem.blaming(was))
        return not same_strides(old, new)

    def _check_offset(self, was: Node, now: Node) -> None:
        """A returned value keeps its storage offset: AOTAutograd rebuilds a result that is a view of an input from its
        sizes, strides and offset alone."""
        old, new = fact(was), fact(now)
        is_returned = was.graph.output_node() in was.users
        if self.program.dialect != ATEN or not is_returned or not isinstance(old, torch.Tensor):
            return
        if not known_equal(old.storage_offset(), new.storage_offset()):
            sentence = "the value is returned, and its storage offset {wanted} would become {found}"
            raise Refused(sentence, at=was, wanted=old.storage_offset(), found=new.storage_offset())

    def _check_gradients(self, edits: Sequence[tuple[Sequence[Node], Sequence[Node], Emitter]]) -> None:
        """The inputs that get a gradient must stay the same, also where that gradient is zero."""
        pairs = [pair for olds, news, _ in edits for pair in zip(olds, news)]
        if problem := self.program.gradient_paths.problem(pairs, [n for _, _, op in edits for n in op.made]):
            raise Refused(problem)

    def _strides_seen(self, node: Node, is_blind: Callable[[str], bool]) -> Node | None:
        """A user whose result may depend on the strides of the value; `is_blind` says which operations' do not."""
        calls = ((user, self.program.call(user)) for user in node.users)
        return next((user for user, call in calls if call is None or not is_blind(call.op)), None)

    def _check_memory(self, was: Node, now: Node, is_new: bool) -> None:
        """The rewrite must neither add nor remove sharing of memory that a write or the caller could notice."""
        aliasing = self.program.aliasing
        if aliasing.same(was, now) and self._same_storage(was, now):
            return
        if is_new and aliasing.is_fresh(was) and aliasing.is_fresh(now):
            return  # a new tensor replaces a new tensor: later writes and views use the replacement
        if writer := aliasing.first_writer(was, now):
            raise Refused("memory of the value is written, by {at}", at=writer)
        was_shares = aliasing.is_input(was)
        now_leaves = aliasing.is_input(now) or aliasing.is_output(now)
        if aliasing.is_output(was) and (now_leaves or was_shares or self._returned_beside(was)):
            sentence = "the value leaves the graph, and would share other memory than before"
            raise Refused(sentence, at=was) if is_new else Refused(f"{sentence}: that of {{found}}", at=was, found=now)
        if not is_new and aliasing.is_output(was) and self._gradient_needs(now, besides=was):
            raise Refused(
                "the value is returned, so the caller may write it, and the gradient needs {found}", at=was, found=now
            )

    def _gradient_needs(self, node: Node, besides: Node) -> bool:
        """May the backward read the value of this node? Before the rewrite the caller gets a copy of it, and may write
        to that copy."""
        is_read = any(user is not besides for user in node.users)
        if self.program.dialect == ATEN:
            return is_read and self.program.is_joint
        if not self.program.gradient_paths.active or not self.program.gradient_paths.of(node):
            return False
        call = self.program.call(node)
        return is_read or call is None or call.op in SAVED_FOR_BACKWARD

    def _returned_beside(self, was: Node) -> bool:
        """Is memory of the value also returned through a value that is not a view of it? This is ignored for gradients:
        nothing promises that they share memory."""
        if returns_gradients(was.graph):
            return False
        return self._returned_through(was) < self.program.aliasing.output_uses(was)

    def _returned_through(self, was: Node) -> int:
        """How many results are the value or views of it."""
        output = was.graph.output_node()
        returned = list(node_operands(output.args)) if self.program.aliasing.is_output(was) else []
        return sum(returned.count(node) for node in self._views(was) if output in node.users) if returned else 0

    def _views(self, was: Node) -> Iterator[Node]:
        """The value and all views of it."""
        aliasing = self.program.aliasing
        work, seen = [was], {was}
        while work:
            node = work.pop()
            yield node
            views = [u for u in node.users if u not in seen and node in aliasing.effects(u).aliases]
            seen.update(views)
            work += views

    def _check_identity(self, was: Node, now: Node) -> None:
        """Raises Refused if the caller could see that an existing value replaces another.

        Two tensors that the caller gets stay two, and a view of an input is not the input: `y.unsqueeze_(0)` on one of
        them, after the call, must not affect the other. And `y = x * 1` under `no_grad`, used after that region, blocks
        the gradient; x in its place would not.
        """
        value = fact(was)
        if value is not None and value is fact(now):
            return  # `x.contiguous()` of a contiguous x is x
        if problem := symbols_would_merge(was, now):
            raise Refused(problem)
        if self.program.aliasing.is_output(was) and _requires_grad(value) != _requires_grad(fact(now)):
            sentence = "the value is returned, and only one of it and its replacement requires a gradient"
            raise Refused(sentence, at=was)
        if self._is_returned(was):
            tensor = self._tensor_itself(now)
            if tensor is not self._tensor_itself(was) and (_is_given(tensor) or self._is_returned(tensor)):
                raise Refused("the value is returned, and would be the very tensor {found}", at=was, found=tensor)
        if self.program.dialect == ATEN:
            return
        for user in was.users:
            if barrier := self.program.aliasing.barrier_between(was, user):
                raise Refused("the value is used beyond {at}, by {found}", at=barrier, found=user)

    def _tensor_itself(self, node: Node) -> Node:
        """The node that this very tensor comes from: `x.add_(1)`, and `x.contiguous()` of a contiguous x, are x."""
        while (same := next((o for o in self.program.aliasing.effects(node).aliases if self._is_same(o, node)), None)):
            node = same
        return node

    def _is_returned(self, node: Node) -> bool:
        """Does the graph return this very tensor, under whatever name?"""
        output = node.graph.output_node()
        work, seen = [node], {node}
        while work:
            one = work.pop()
            if output in one.users:
                return True
            same = [u for u in one.users if u not in seen and self._is_same(one, u)]
            seen.update(same)
            work += same
        return False

    def _is_same(self, operand: Node, node: Node) -> bool:
        """Does the node return its operand itself?"""
        seen, value = self.program.aliasing.effects(node), fact(node)
        in_place = len(seen.writes) == 1 and seen.writes == seen.aliases
        return operand in seen.aliases and (in_place or (value is not None and fact(operand) is value))

    def _same_storage(self, was: Node, now: Node) -> bool:
        """Do both certainly share memory? `reshape` and similar operations may copy: at the torch level the facts say
        whether they did. In ATen a value that is not a view has separate memory, whatever its alias class: a
        higher-order operator puts all its operands into one class, since its results may alias any of them."""
        aliasing = self.program.aliasing
        if self.program.dialect == ATEN:
            return bool(aliasing.effects(was).aliases)
        return not aliasing.surely_apart(was, now)

    def _check_results(self, was: Node, covered: Iterable[Node]) -> None:
        """A result that is a view of another result must stay one. If both became views of a third value, kernels would
        write them to separate memory."""
        if self.program.dialect != ATEN or not self.program.aliasing.is_output(was):
            return
        output, viewed = was.graph.output_node(), self.program.aliasing.effects(was).aliases
        for node in covered:
            if node in viewed and output in node.users and self._returned_through(was):
                raise Refused("the value is a view of {at}, which is returned too", at=node)

    def _check_saved(self, was: Node, now: Node, new_nodes: Iterable[Node]) -> None:
        """Autograd saves the results of some operations for the backward: an in-place write to such a result, which was
        allowed before the rewrite, would become an error."""
        aliasing = self.program.aliasing
        if not aliasing.written(was) or not self.program.gradient_paths.active:
            return
        call = self.program.call(was)
        for node in new_nodes:
            new = self.program.call(node)
            if new is None or new.op not in SAVED_FOR_BACKWARD or not aliasing.same(node, now):
                continue
            if call is None or call.op != new.op:
                sentence = f"the result is written by {{at}}, and the gradient of {new.op} needs its old value"
                raise Refused(sentence, at=aliasing.first_writer(was))
