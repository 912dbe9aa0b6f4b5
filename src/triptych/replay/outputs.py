"""How the results of a recorded program leave it, so that no replay changes what a user holds.

The graph writes its results to the same memory at every replay. A result of the program therefore leaves as a copy
(`Role.OWN`). What only autograd gets is not copied: values that the backward reads (`Role.KEPT`) and gradients
(`Role.HANDED`) leave as they are, and the graph is replayed again only when their use counts say that nobody holds
them.
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _private
from .device import Device
from .inputs import NotRecordable, copy_all


class Role(enum.Enum):
    OWN = "leaves as a copy, in memory of its own"
    KEPT = "stays in the memory of the graph while the backward needs it"
    HANDED = "leaves in the memory of the graph, as a new tensor at each call"


@dataclass(frozen=True)
class View:
    """A tensor over the memory of another: its geometry, from the start of that memory in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor, shift: int = 0) -> Tensor:
        # detached: views that leave an autograd function together may not be written in place
        return base.as_strided(self.size, self.stride, self.offset + shift).detach()


class Region:
    """Memory of results that leaves as one copy: one tensor, or several over the same memory."""

    def __init__(self, results: Sequence[tuple[int, Tensor]], device: Device) -> None:
        tensors = [x for _, x in results]
        first = tensors[0]
        if any(read_as(x) != read_as(first) for x in tensors):
            raise NotRecordable("results of different types share memory")
        self.device, self.dtype = device, first.dtype
        self.positions = [i for i, _ in results]
        self.is_whole = len(tensors) == 1 and _private.overlaps_itself(first) == 0
        if self.is_whole:
            self.source = first
            return
        begin = min(int(x.storage_offset()) for x in tensors)
        end = max(int(x.storage_offset()) + extent(x) for x in tensors)
        self.source = first.as_strided((end - begin,), (1,), begin)
        self.views = [View(tuple(x.size()), x.stride(), int(x.storage_offset()) - begin) for _, x in results]

    def empty(self) -> Tensor:
        return self.device.empty(self.source.size(), self.source.stride(), self.dtype)

    def place(self, copy: Tensor, results: list[Any]) -> None:
        if self.is_whole:
            results[self.positions[0]] = copy
            return
        for i, view in zip(self.positions, self.views):
            results[i] = view.of(copy)


class Outputs:
    """The results of one recording, and how each leaves."""

    def __init__(
        self,
        results: Sequence[Any],
        roles: Sequence[Role],
        inputs: Sequence[Any],
        returned: Sequence[int],
        device: Device,
    ) -> None:
        """`returned`: inputs that are returned themselves, where a result lies in their memory."""
        self.device = device
        self.constant: list[Any] = [x if not isinstance(x, Tensor) else None for x in results]
        self.of_inputs: list[tuple[int, int, View | None]] = []
        """Results that lie in the memory of such an input: position, input, view or the same."""
        self.handed: list[tuple[int, Tensor]] = []
        self.repeated: list[tuple[int, int]] = []
        """Results that are another one once more, and that one. Autograd must see that: it would make two gradients of
        them that share memory, and add to both."""
        kept: list[Tensor] = []
        own: dict[int | None, list[tuple[int, Tensor]]] = {}
        memory_of = {_private.storage_id(inputs[i]): i for i in reversed(returned)}
        first_of: dict[tuple[int, Role], int] = {}
        for position, (x, role) in enumerate(zip(results, roles, strict=True)):
            if not isinstance(x, Tensor):
                continue
            if type(x) not in (Tensor, Parameter) or x.layout != torch.strided:
                raise NotRecordable("a result is not a plain tensor")
            if (first := first_of.setdefault((id(x), role), position)) != position:
                self.repeated.append((position, first))
            elif (i := memory_of.get(_private.storage_id(x))) is not None:
                self.of_inputs.append((position, i, view_of(x, inputs[i])))
            elif role is Role.OWN:
                own.setdefault(_private.storage_id(x), []).append((position, x))
            elif role is Role.HANDED:
                self.handed.append((position, x))
            else:
                self.constant[position] = x
                kept.append(x)
        self.regions = [Region(group, device) for group in own.values()]
        self.lent = [*kept, *(x for _, x in self.handed)]
        """Results that leave in the memory of the graph, with what Python has of that memory, and where it is."""
        self.storages = [x.untyped_storage() for x in self.lent]
        self.memory = [_private.storage_id(x) for x in self.lent]
        self.addresses = [x.data_ptr() for x in self.lent]
        self.positions = [*range(len(self.lent))]
        self.stays = {*self.memory, *(_private.storage_id(inputs[i]) for _, i, _ in self.of_inputs)}
        """Memory of results that is in the same place at each replay, for a backward that reads them."""
        self.at_rest: list[int] = []

    def nobody_holds_them_now(self) -> None:
        """Note the use counts of a moment at which only the recording has its results."""
        self.at_rest = self._use_counts()

    def are_held(self) -> bool:
        """Does anybody else have a result that lies in the memory of the graph, or a view of one?

        Whoever had one may also have freed its memory, or given it another: the graph must never write there again.
        """
        if any(map(operator.gt, self._use_counts(), self.at_rest)):
            return True
        return not self.device.lie_at(self.lent, self.addresses, self.positions)

    def _use_counts(self) -> list[int]:
        counts: list[int] = []
        for x, python, memory in zip(self.lent, self.storages, self.memory):
            # references of Python and of C++ to the tensor, and to its memory. All of Python's count as one of C++
            counts += (sys.getrefcount(x), _private.use_count(x))
            counts += (sys.getrefcount(python), _private.storage_use_count(memory))
        return counts

    def take(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the last replay, which the caller may keep."""
        results = self.constant.copy()
        for position, x in self.handed:
            results[position] = x.detach()
        for position, i, view in self.of_inputs:
            results[position] = inputs[i] if view is None else view.of(inputs[i], inputs[i].storage_offset())
        copies = [region.empty() for region in self.regions]
        copy_all(copies, [region.source for region in self.regions])
        for region, copy in zip(self.regions, copies):
            region.place(copy, results)
        for position, first in self.repeated:
            results[position] = results[first]
        return results


def read_as(x: Tensor) -> tuple[torch.dtype, bool, bool]:
    """How the memory of a tensor is read. A view by size, stride and offset does not change that."""
    return x.dtype, x.is_conj(), x.is_neg()


def extent(x: Tensor) -> int:
    """Elements from the first to the last of a tensor in its memory."""
    return 0 if x.numel() == 0 else 1 + sum((size - 1) * stride for size, stride in zip(x.size(), x.stride()))


def view_of(x: Tensor, base: Tensor) -> View | None:
    """The geometry of a result over the memory of an input; None if it is the input."""
    if read_as(x) != read_as(base):
        raise NotRecordable("a result is an input read as another type")
    view = View(tuple(x.size()), x.stride(), int(x.storage_offset() - base.storage_offset()))
    same = View(tuple(base.size()), base.stride(), 0)
    return None if view == same else view


Run = Callable[[list[Any]], Sequence[Any]]
