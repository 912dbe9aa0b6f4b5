"""Proves that a new value may be written into the memory of an operand without any visible difference.

`y = f(x)` may be computed into the memory of x if

- no two elements of x overlap in memory: no `expand`, no overlapping `as_strided`;
- nothing reads or writes the old x, or an alias of it, after f. One write is allowed, `copy_(x, z)`, which overwrites
  all of x. If z is y itself, the copy becomes redundant and is erased; if z is another value, y must not be read after
  that copy;
- x is not an input of the graph, since the caller sees the final value of an input. If there is such a copy, x may be
  an input; then y must not be returned, since the result would share the caller's memory;
- no other operand of f shares memory with x;
- x is not complex, for Inductor: it calls ATen for views of complex tensors, and may move a read before a write;
- y has the strides of x, unless only that copy reads it.

Aliases are those of `ir.alias`: values that may share memory. The base of a view, and its sizes, strides and offset,
are recomputed from the operations, because facts that were recorded during tracing may describe a place in memory that
has changed since.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .collectives import awaited, is_wait
from .effects import node_operands
from .facts import known_equal, same_strides, tensor_fact
from .inlined_reads import inlined_reads
from .memory_places import Place, lies_at, overlaps_itself, place, same_order
from .program import Program
from .refusal import Refusal

aten = torch.ops.aten

COPY = aten.copy_.default

SIZES_ONLY = frozenset(
    (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
)
"""Operations that read no element."""

UNDECLARED_VIEWS = frozenset((aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default))
"""Operations whose result may share the operand's memory although the schema does not say so."""

LAZY_COPIES = frozenset((aten.flip.default, aten.repeat.default))
"""Copies that Inductor does not materialise: it reads the operand, in another order, where the result is used. Before a
buffer is written, Inductor saves the values computed from it, but it treats these copies as the buffer itself."""


MOST_USERS = 256
"""A value with more users is not moved into other memory, since each user has to be updated. This limit keeps the work
linear where a tensor is written very often."""


@dataclass(frozen=True)
class Overwrite:
    """A value that may be written into the memory of `destination`."""

    value: Node | None
    """None for a result that no node reads."""
    destination: Node
    copy_back: Node | None = None
    """`copy_(destination, value)`, which becomes redundant."""


class LaterUses:
    """Which later nodes read or write a memory, tracked while the graph is walked from its end to its beginning."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inductor = _is_for_inductor(program)
        self._lazy_writes: list[tuple[Node, list[Node | None]]] = []
        """For Inductor: writes, each with the values that its kernel may read in another order than it writes."""
        self._touches: dict[Node, list[Node]] = {}
        """Later uses by memory, as heaps: when two memories are merged, the smaller heap is pushed into the larger."""
        self._passed: set[Node] = set()
        self._synced = 0
        hidden = UNDECLARED_VIEWS | LAZY_COPIES if self.inductor else UNDECLARED_VIEWS
        for node in program.graph.nodes:
            if node.target in hidden:
                program.aliasing.count_as_shared(node, node.args[0])

    def walk(self) -> Iterator[Node]:
        """Yields the nodes, the last first. While one is handled, `of` knows the uses by the nodes after it. If a
        rewrite erases it, the nodes put in its place are recorded as uses too."""
        node = self.program.graph.output_node()
        self._pass(node)
        while (node := node.prev).op != "root":
            before = node.prev
            yield node
            while before._erased:
                before = before.prev
            if node._erased:
                added = itertools.takewhile(lambda n: n not in self._passed, _from(before.next))
                for new in reversed(list(added)):
                    self._pass(new)
                node = before.next
            else:
                self._pass(node)

    def of(self, value: Node) -> list[Node]:
        """The nodes after the current one that read or write memory of the value."""
        return [n for n in self._heap(value) if not n._erased]

    def first(self, value: Node) -> Node | None:
        """The first node after the current one that reads or writes memory of the value."""
        touches = self._heap(value)
        while touches and touches[0]._erased:
            heapq.heappop(touches)
        return touches[0] if touches else None

    def _heap(self, value: Node) -> list[Node]:
        self._sync()
        return self._touches.get(self.program.aliasing.memory(value), [])

    def _pass(self, node: Node) -> None:
        self._passed.add(node)
        seen = self.program.aliasing.effects(node)
        is_view = bool(seen.aliases) and not (seen.writes or seen.may_copy or seen.random or seen.kept)
        if is_view or node.target is operator.getitem or node.target in SIZES_ONLY:
            return  # a node that reads through the view is a use, the view itself is not
        if self.inductor and seen.writes and (reads := _reads_of_write(self.program, node)):
            self._lazy_writes.append((node, reads))
        self._sync()
        operands = node.all_input_nodes
        if is_wait(node) and (source := awaited(node)) is not None:
            operands = [*operands, *source.operands]  # which the collective may read until then
        for operand in operands:
            heapq.heappush(self._touches.setdefault(self.program.aliasing.memory(operand), []), node)

    def lazy_write(self, values: Iterable[Node], besides: Node | None) -> Node | None:
        """A later write to memory of these values whose kernel may read that memory in another order; not `besides`.

        Inductor's scheduler separates such a write from the read only if the memory was not written before.
        """
        memory, effects = self.program.aliasing.memory, self.program.aliasing.effects
        shared = {memory(v) for v in values}
        for node, reads in self._lazy_writes:
            if node is besides or node._erased or shared.isdisjoint(map(memory, effects(node).writes)):
                continue
            if any(read is None or memory(read) in shared for read in reads):
                return node
        return None

    def _sync(self) -> None:
        """Merge the uses of values that came to share memory by a rewrite."""
        joined = self.program.aliasing.joined
        for part, whole in joined[self._synced :]:
            fewer, more = sorted((self._touches.pop(part, []), self._touches.pop(whole, [])), key=len)
            for node in fewer:
                heapq.heappush(more, node)
            self._touches[whole] = more
        self._synced = len(joined)


def _reads_of_write(program: Program, node: Node) -> list[Node | None]:
    """Values that Inductor may read inside the kernel of a write, except each element that is read just before it is
    written."""
    written = program.aliasing.effects(node).writes
    if not isinstance(node.target, _private.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return []  # a separate kernel, into which nothing is inlined
    there = place(program, written[0]) if node.target is COPY else None
    sources = [n for n in node.all_input_nodes if n not in written]
    return [read for read, _ in inlined_reads(program, sources, there)]


def _from(node: Node) -> Iterator[Node]:
    while node.op != "root":
        yield node
        node = node.next


class Operands:
    """The operands of an operation that will overwrite some of them, and which others conflict with that."""

    def __init__(
        self,
        program: Program,
        destinations: Iterable[Any],
        others: Iterable[Node],
        inlines: bool = True,
        written: Place | None = None,
    ) -> None:
        """`written`: the place that is written, if it is written in the order of the operands' elements. An operand may
        then be exactly that place. `inlines`: Inductor may compute the other operands inside the kernel that writes."""
        self._memory = program.aliasing.memory
        self._operands: dict[Node, list[Node]] = {}
        """The operands by memory."""
        others = [n for n in others if written is None or not lies_at(program, n, written)]
        for node in (*node_operands(list(destinations)), *others):
            self._operands.setdefault(self._memory(node), []).append(node)
        reads = inlined_reads(program, others, written) if inlines and _is_for_inductor(program) else ()
        self._inlined = {read and self._memory(read): operand for read, operand in reads}

    def problem(self, destination: Node) -> Refusal | None:
        memory = self._memory(destination)
        if len(same := self._operands[memory]) > 1:
            other = next((n for n in same if n is not destination), destination)
            return Refusal("{found} may share memory with {at}", at=destination, found=other)
        if (lazy := self._inlined.get(memory, self._inlined.get(None))) is not None:
            sentence = "{found} may read {at}, and Inductor may compute it inside the write"
            return Refusal(sentence, at=destination, found=lazy)
        return None


def _is_for_inductor(program: Program) -> bool:
    return program.options.codegen == "inductor"


def overwrite(later: LaterUses, value: Node | None, destination: Any, operands: Operands) -> Overwrite | Refusal:
    """An `Overwrite` if `value` provably may be written into `destination`, one of the operands; else why not."""
    program, aliasing = later.program, later.program.aliasing
    there = place(program, destination) if isinstance(destination, Node) else None
    if there is None or not _is_plain(there.tensor):
        return Refusal("the place of {at} in memory is not known", at=destination)
    if later.inductor and there.tensor.is_complex():
        return Refusal("{at} is complex: Inductor does not know which views share its memory", at=destination)
    if overlaps_itself(there.tensor):
        return Refusal("elements of {at} may overlap in memory", at=destination)
    if problem := operands.problem(destination):
        return problem
    first = later.first(destination)
    if first is not None and not _overwrites(program, first, there):
        return Refusal("{at} is used afterwards, by {found}", at=destination, found=first)
    if first is None and aliasing.is_input(destination):
        return Refusal("{at} is an input, and the caller sees its old value", at=destination)
    goes = first is not None and value is not None and _is_in_order(program, first.args[1], value)
    memory = [destination] if value is None else [destination, value]
    if later.inductor and (lazy := later.lazy_write(memory, besides=first if goes else None)) is not None:
        return Refusal("{found} writes {at} too, and may read it in another order", at=destination, found=lazy)
    if value is None:
        return Overwrite(None, destination, None)
    if len(value.users) > MOST_USERS:
        return Refusal("the new value has more than {wanted} users", wanted=MOST_USERS, found=len(value.users))
    result = tensor_fact(value)
    if result is None or not _is_plain(result) or result.dtype != there.tensor.dtype:
        return Refusal("shape and dtype are not known", at=value)
    if not known_equal(result.shape, there.tensor.shape) or result.device != there.tensor.device:
        return Refusal("the new value has another shape or device than {at}", at=destination)
    if not same_strides(result, there.tensor) and not (goes and list(value.users) == [first]):
        return Refusal("strides {wanted} would become {found}", wanted=result.stride(), found=there.tensor.stride())
    if aliasing.is_output(value) and (there.base is not destination or aliasing.is_input(destination)):
        return Refusal("the new value of {at} is returned, and would share other memory", at=destination)
    if not known_equal(result.storage_offset(), there.tensor.storage_offset()) and _offset_matters(program, value):
        return Refusal("{at} has another storage offset than the new value, whose offset is used", at=destination)
    if first is None:
        return Overwrite(value, destination)
    users = later.of(value)
    if not goes and first in users:
        return Refusal("{found} writes {at} from a view of the new value", at=destination, found=first)
    behind = next((u for u in users if first < u), None)
    if behind is not None and not goes:
        return Refusal("{at} is overwritten before {found} reads the new value", at=destination, found=behind)
    if behind is not None:
        if aliasing.is_output(value) and aliasing.is_output(destination):
            return Refusal("{at} is returned beside its new value, and both would share memory", at=destination)
        writers = itertools.chain(aliasing.writers(destination), aliasing.writers(value))
        if (writer := next((w for w in writers if first < w), None)) is not None:
            return Refusal(
                "{found} writes {at} or its new value later, and both would share memory", at=destination, found=writer
            )
    return Overwrite(value, destination, first if goes else None)


def _offset_matters(program: Program, value: Node) -> bool:
    """Does any user address elements relative to the start of the storage, as `as_strided` does?"""
    work, seen = [value], {value}
    while work:
        node = work.pop()
        for user in node.users:
            if "as_strided" in str(user.target) or isinstance(user.target, _private.HigherOrderOperator):
                return True
            if user not in seen and node in program.aliasing.effects(user).aliases:
                seen.add(user)
                work.append(user)
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return _private.is_ordinary(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _overwrites(program: Program, node: Node, there: Place) -> bool:
    """Does the node overwrite every element of this place?"""
    if node.target is not COPY or node.args[0] is node.args[1]:
        return False
    target = place(program, node.args[0])  # type: ignore[arg-type]
    source = tensor_fact(node.args[1])
    if target is None or not target.same_elements(there) or source is None:
        return False
    return source.dtype == target.tensor.dtype and known_equal(source.shape, target.tensor.shape)


def _is_in_order(program: Program, view: Any, value: Node) -> bool:
    """Is `view` a view of all elements of the value, in the same order?"""
    if view is value:
        return True
    there, whole = place(program, view), tensor_fact(value)
    if there is None or there.base is not value or whole is None or there.tensor.dtype != whole.dtype:
        return False
    return known_equal(there.start, 0) and same_order(there.tensor, whole)
