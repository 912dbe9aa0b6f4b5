"""Buffers as known values: what a buffer of the user's modules holds is read while compiling, and guarded at run time.

A registered causal mask is the same on every call, but nothing promises that it stays so. A rule that asks about the
elements of a buffer gets them, and the program that was rewritten with that knowledge is guarded: before each call
Dynamo asks `SameContents` whether the buffer still holds them, and compiles the program again if not.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ... import _private
from ...options import Options
from ..alias import Aliasing
from ..dynamo_guards import add_guard, add_lambda_guard, saves_guards, source_name
from ..facts import is_static, tensor_fact
from ..origins import given_tensor
from .contents import holds_two_numbers, pattern_of
from .elements import Elements
from .shape_only import is_plain

SIGHTINGS = 256
"""How many tensors a guard remembers; modules that share compiled code have one buffer each."""

COMPARISONS = 16
"""How often the contents of one tensor are compared at run time. A buffer that is written more often, even if with the
same contents (DistributedDataParallel broadcasts buffers before each forward), is not worth reading each time."""

READABLE = ("cpu", "cuda", "xpu")

Origin = tuple[Any, str]
"""A buffer as Dynamo finds it: which function it compiles, and the expression that gives the buffer there."""

_changed: set[Origin] = set()
"""Buffers whose contents changed after they were read. They are not read again: the next change would cost another
compile."""


@dataclass(frozen=True)
class Contents:
    """What a buffer holds."""

    value: torch.Tensor
    """All elements, on the CPU."""
    pattern: Elements | None
    """None if the elements are two numbers that follow no known pattern."""


class KnownBuffers:
    """The buffers that one captured program reads; each is read once, when a rule first asks about it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.reads = 0
        self.guards: dict[Node, SameContents] = {}
        """One for each buffer whose contents a rule was given."""
        self._contents: dict[Node, Contents | None] = {}
        self._written_memory: set[int | None] | None = None
        """The storages of the inputs that are written, and of parameters; None stands for an unknown storage."""
        self._by_digest: dict[str, Contents | None] = {}
        """The layers of a model have the same mask: its pattern is looked for once."""

    def contents(self, node: Node, aliasing: Aliasing) -> Contents | None:
        """The contents of an input that is a buffer; None if it is not, may not be read, or has no known pattern."""
        if node not in self._contents:
            self._contents[node] = self._read(node, aliasing)
        return self._contents[node]

    def attach_guards(self) -> None:
        """Make Dynamo check, before each call of the program, that the buffers still have the contents that rules were
        given. From now on rules get no contents, and the elements are released, because this object lives as long as
        the compiled program."""
        for node, same in self.guards.items():
            add_guard(_source(node), functools.partial(_create_guard, same=same))
        self._contents = dict.fromkeys(self._contents)
        self._by_digest.clear()

    @property
    def digest(self) -> str:
        """A digest of the contents that rules were given, for cache keys."""
        return "/".join(f"{node.name}={same.digest}" for node, same in self.guards.items())

    def _read(self, node: Node, aliasing: Aliasing) -> Contents | None:
        origin, tensor = self._origin(node), given_tensor(node)
        if origin is None or origin in _changed or tensor is None:
            return None
        if not self._may_be_read(node, tensor) or self._is_written(node, tensor, aliasing):
            return None
        self.reads += 1
        same = SameContents(tensor, origin)
        with _private.plain_torch(), torch.no_grad():
            value = tensor.detach().cpu()
            same.digest = digest_of(value)
            if same.digest not in self._by_digest:
                value = value.clone()  # no result may share the user's memory
                pattern = pattern_of(value)
                told = pattern is not None or holds_two_numbers(value)
                self._by_digest[same.digest] = Contents(value, pattern) if told else None
        contents = self._by_digest[same.digest]
        if contents is not None:
            self.guards[node] = same
        return contents

    def _origin(self, node: Node) -> Origin | None:
        """None for an input that is not a buffer of a module, and where the guard could not be checked: outside Dynamo,
        or if guards are saved with the compiled code."""
        context, source = _private.CompileContext.try_get(), _source(node)
        if context is None or source is None or "._buffers[" not in (name := source_name(source)):
            return None
        return None if saves_guards() else (context.compile_id.frame_id, name)

    def _may_be_read(self, node: Node, tensor: torch.Tensor) -> bool:
        known = tensor_fact(node)
        if known is None or not is_static(known.shape) or known.shape != tensor.shape or known.dtype != tensor.dtype:
            return False
        # a single number is more often a counter or a scale, which changes, than a constant
        return is_readable(tensor) and tensor.numel() > 1 and tensor.nbytes <= self.options.known_buffers_bytes

    def _is_written(self, node: Node, tensor: torch.Tensor, aliasing: Aliasing) -> bool:
        """Is the buffer written by the program, by its own name or through another input that shares its memory? An
        optimizer will write parameters, and a buffer made of `weight.data` does not count those writes."""
        if aliasing.written(node):
            return True
        if self._written_memory is None:
            inputs = [(given_tensor(n), aliasing.written(n)) for n in node.graph.find_nodes(op="placeholder")]
            tensors = [t for t, written in inputs if written or isinstance(t, torch.nn.Parameter)]
            self._written_memory = {None if t is None else _private.storage_id(t) for t in tensors}
        return not self._written_memory.isdisjoint([None, _private.storage_id(tensor)])


def is_readable(tensor: torch.Tensor) -> bool:
    """A plain tensor, no parameter, whose elements can be copied and whose writes are counted."""
    if type(tensor) is not torch.Tensor or not is_plain(tensor) or tensor.device.type not in READABLE:
        return False
    return not (tensor.requires_grad or tensor.is_inference() or tensor.is_neg())


def forget_changes() -> None:
    """Called when all compiled programs are dropped: buffers that changed may be read again."""
    _changed.clear()


# ---- at run time ----


@dataclass(frozen=True)
class Sighting:
    """A tensor as it was when its contents were compared."""

    version: int
    address: int
    strides: tuple[int, ...]
    memory: Any
    """A weak reference to the storage: while that lives, no other memory has its address."""
    same: bool
    comparisons: int = 0


class SameContents:
    """The guard of one buffer: does a tensor hold what was read at compile time?

    A tensor that was compared before is recognised by its identity, its version counter, its address and its strides;
    this check is the cost of an ordinary call. Any other tensor is read and compared, once: the buffers of all layers
    that share a compiled function hold the same mask, and `load_state_dict` mostly writes what was there before. No
    reference to a tensor is stored: a strong one would keep the user's memory alive, a weak one forbids `swap_tensors`.
    """

    def __init__(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.origin, self.dtype, self.shape = origin, tensor.dtype, tensor.shape
        self.digest = ""
        self.reads = 0
        """How often contents were compared at run time."""
        self._sightings: dict[int, Sighting] = {id(tensor): _sighting(tensor)}

    def __call__(self, tensor: Any) -> bool:
        seen = self._sightings.get(id(tensor))
        try:
            if (
                seen is not None
                and tensor._version == seen.version
                and tensor.data_ptr() == seen.address
                and tensor.stride() == seen.strides
                and not seen.memory.expired()
            ):
                return seen.same
            return self._compare(tensor, 0 if seen is None else seen.comparisons)
        except RuntimeError:  # a tensor without a version counter or memory cannot be checked
            return False

    def _compare(self, tensor: Any, comparisons: int) -> bool:
        if not is_readable(tensor) or tensor.dtype != self.dtype or tensor.shape != self.shape:
            return False
        seen = _sighting(tensor)  # before it is read
        same = False
        if comparisons < COMPARISONS:
            self.reads += 1
            with _private.plain_torch(), torch.no_grad():
                same = digest_of(tensor.detach().cpu()) == self.digest
        if not same:
            _changed.add(self.origin)
        if len(self._sightings) >= SIGHTINGS:
            self._sightings.clear()
        self._sightings[id(tensor)] = replace(seen, same=same, comparisons=comparisons + 1)
        return same


def _sighting(tensor: torch.Tensor) -> Sighting:
    memory = _private.StorageWeakRef(tensor.untyped_storage())
    return Sighting(tensor._version, tensor.data_ptr(), tensor.stride(), memory, same=True)


def digest_of(value: torch.Tensor) -> str:
    """A digest of the elements of a CPU tensor, whatever its strides."""
    value = value.contiguous()
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    digest.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    return digest.hexdigest()


def _create_guard(builder: Any, guard: Any, same: Callable[[Any], bool]) -> None:
    """What Dynamo calls when it builds the guards of a program."""
    add_lambda_guard(builder, guard, same, "holds what was read when the program was compiled")


def _source(node: Node) -> Any:
    return getattr(node.meta.get("grapharg"), "source", None)
