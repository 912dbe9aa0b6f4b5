"""A cache for the facts of equal calls: the layers of a model make the same calls on operands of the same shapes.

The storage of a fact says which values share memory. So every lookup of a fact about new memory returns a copy with a
new storage, and every lookup of a view one with the storage of the operand that is viewed this time. In-place
operations and symbolic sizes are always computed: numbers that depend on data get new symbols each time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _private
from .facts import is_static, storage

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unlike(Exception):
    """An argument has no key: its fact does not determine the fact of the call."""


@dataclass(frozen=True)
class _Fact:
    """The metadata of a cached fact. The tensor itself is not stored: computing `unsqueeze_` would change its shape."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Any = 0
    operand: int = 0
    """Of a view: which of the tensors among the arguments is viewed."""
    requires_grad: bool = False
    """Of a view: a view of a tensor that requires a gradient does so itself, even where gradients are off."""

    @staticmethod
    def of(value: torch.Tensor, operand: int = 0) -> _Fact:
        place = (value.storage_offset(), operand, value.requires_grad)
        return _Fact(tuple(value.shape), value.stride(), value.dtype, value.device, *place)

    def in_new_memory(self, mode: Any) -> torch.Tensor:
        with _private.without_dispatch_modes():
            memory = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            return _private.FakeTensor(mode, memory, self.device)

    def in_memory_of(self, viewed: torch.Tensor, mode: Any) -> torch.Tensor:
        with _private.without_dispatch_modes(), torch.no_grad():
            memory = torch.empty(0, dtype=self.dtype, device="meta")
            memory.set_(viewed.untyped_storage(), self.offset, self.shape, self.stride)
            return _private.FakeTensor(mode, memory.requires_grad_(self.requires_grad), self.device)


@dataclass(frozen=True)
class _Views:
    """The facts of views, and the type of the sequence in which they are returned; None for a single view."""

    kind: Any
    facts: tuple[_Fact, ...]


class FactMemo:
    """Facts by the call and the facts of its operands, in one fake mode."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.examples: dict[Hashable, Any] = {}
        """Facts that a rule has made only to ask what would follow from them, by a key of its own."""
        self._facts: dict[Hashable, _Fact] = {}
        self._views: dict[Hashable, _Views] = {}
        self._computed_always: set[Any] = set()
        """Targets that have returned something else than new memory, views or an operand itself."""

    def key(self, target: Any, *arguments: Any) -> Hashable | None:
        """A key that is equal for calls with equal facts; None if the fact of this call must not be cached."""
        if self.mode is None or target in self._computed_always:
            return None
        try:
            return (target, self._known(arguments))
        except _Unlike:
            return None

    def in_shape(self, value: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor | None:
        """What `value.new_empty(shape)` is, without the cost of computing it; None where the facts do not tell."""
        if not self._is_plain(value) or not is_static(shape):
            return None
        strides = torch.empty(shape, device="meta").stride()
        return _Fact(tuple(shape), strides, value.dtype, value.device).in_new_memory(self.mode)

    def recall(self, key: Hashable | None) -> torch.Tensor | None:
        """The fact of an earlier call with that key, in new memory."""
        known = self._facts.get(key)
        return None if known is None else known.in_new_memory(self.mode)

    def recall_views(self, key: Hashable | None, *arguments: Any) -> Any:
        """The fact of an earlier call with that key, which was a view of an operand or several of them, in the memory
        of the operand of this call."""
        known = self._views.get(key)
        if known is None:
            return None
        tensors = list(_tensors(arguments))
        views = [one.in_memory_of(tensors[one.operand], self.mode) for one in known.facts]
        return views[0] if known.kind is None else known.kind(views)

    def remember(self, key: Hashable | None, value: Any, *arguments: Any) -> None:
        if key is None:
            return
        if self._is_new_memory(value, arguments):
            self._facts[key] = _Fact.of(value)
        elif (views := self._as_views(key, value, arguments)) is not None:
            self._views[key] = views
        elif not any(operand is value for operand in _tensors(arguments)):  # as `reshape` to the same shape returns it
            self._computed_always.add(key[0])  # type: ignore[index]

    def _as_views(self, key: Any, value: Any, arguments: Any) -> _Views | None:
        """The facts of a result that consists of views of operands alone."""
        if "as_strided" in str(key[0]):
            return None  # whether it fits depends on the size of its operand's memory, which the key leaves out
        kind = type(value) if type(value) in (list, tuple) else None
        results = [value] if kind is None else value
        memories = [storage(operand) for operand in _tensors(arguments)]
        facts = []
        for result in results:
            if not self._is_plain(result) or any(self._flags(result)[1:]):
                return None
            itself = any(operand is result for operand in _tensors(arguments))
            memory = storage(result)
            if itself or memory is None or memories.count(memory) != 1:
                return None
            facts.append(_Fact.of(result, memories.index(memory)))
        return _Views(kind, tuple(facts)) if facts else None

    def _known(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return (type(value), *map(self._known, value))
        if isinstance(value, dict):
            return (dict, *((k, self._known(v)) for k, v in value.items()))
        if isinstance(value, slice):
            return (slice, *map(self._known, (value.start, value.stop, value.step)))
        if isinstance(value, CONSTANTS):
            return (type(value), value)  # 1, 1.0 and True compare equal but differ as arguments
        raise _Unlike

    def _tensor(self, value: torch.Tensor) -> Hashable:
        if not self._is_plain(value):
            raise _Unlike
        return (value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), self._flags(value))

    def _flags(self, value: torch.Tensor) -> tuple[bool, ...]:
        return (value.requires_grad, value.is_conj(), value.is_neg())

    def _is_plain(self, value: Any) -> bool:
        """A strided fake tensor of this mode with static sizes and strides, and without known elements."""
        return (
            type(value) is _private.FakeTensor
            and value.fake_mode is self.mode
            and value.constant is None
            and value.layout is torch.strided
            and is_static(value.shape)
            and is_static((*value.stride(), value.storage_offset()))
        )

    def _is_new_memory(self, value: Any, arguments: Any) -> bool:
        if not self._is_plain(value) or value.storage_offset() or self._flags(value) != (False, False, False):
            return False
        memory = storage(value)
        if memory is None or any(storage(operand) == memory for operand in _tensors(arguments)):
            return False
        like = _Fact.of(value).in_new_memory(self.mode)
        return like.untyped_storage().nbytes() == value.untyped_storage().nbytes()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
