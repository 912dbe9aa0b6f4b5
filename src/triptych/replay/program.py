"""A compiled graph that is called, and replayed where that is quicker and nobody can notice."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .. import _private
from .decision import BY_THE_CLOCK, Policy, Timed, not_faster, shown, too_long_on_device, too_much_memory
from .device import Device
from .inputs import NotRecordable
from .outputs import Role, Run
from .recording import Recording

log = logging.getLogger("triptych")

HELD = 4
"""So many recordings of a program lie in the same place, each for one more call whose results are still held."""
PLACES = 64
"""The most recordings of a program with the same sizes. A block that a model has many times is one program, recorded
with the weights of each."""
SIZES = 8
"""For so many sizes is a program with dynamic shapes recorded."""
WAITS = 8
"""So many calls a backward waits until what it reads is kept in its place. Then it is copied, unless it is large."""
MOVES = 4 * PLACES
"""After so many calls in a row that found their inputs elsewhere than in any recording, the recordings are dropped."""
LARGE = 2**20
"""Bytes from which on an input is not copied at each call if it may lie in the memory of another recording."""

memory_in_place: weakref.WeakValueDictionary[int | None, Recording] = weakref.WeakValueDictionary()
"""The memory of results of recordings, for a backward that reads them: it stays where it is as long as they do."""


@dataclass
class Sizes:
    """A program with the sizes of one call: what has been tried with them."""

    calls: Timed = field(default_factory=Timed)
    replays: Timed = field(default_factory=Timed)
    is_warm: bool = False
    recordings: list[Recording] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    """Inputs that were seen at another address than before."""
    moves: int = 0
    """How often its inputs lay elsewhere than in any recording, since the last call for which one matched."""
    last_inputs: list[int] = field(default_factory=list)
    refused: str = ""
    """Why it is not replayed."""
    settled: bool = False
    """Has the clock decided?"""
    times_held: int = 0
    times_waited: int = 0
    peak: int = 0
    """The process's peak of memory before the last recording."""
    is_full: str = ""
    """Why there are no more recordings."""


class Program:
    """What stands in front of one compiled graph, or of one part of it."""

    def __init__(
        self,
        run: Run,
        roles: Sequence[Role],
        device: Device,
        *,
        fixed: Collection[int] = (),
        written: Collection[int] = (),
        policy: Policy = BY_THE_CLOCK,
        name: str = "program",
    ) -> None:
        self.run, self.roles, self.device, self.policy, self.name = run, roles, device, policy, name
        self.fixed, self.written = frozenset(fixed), frozenset(written)
        self.by_sizes: dict[tuple[int, ...], Sizes] = {}
        self.sizes_among_inputs: tuple[int, ...] | None = None
        self.refused = ""
        """Why it is never replayed."""
        self.lock = threading.Lock()
        """Held during a call. Whoever calls meanwhile, be it a finalizer in the same thread, gets no replay."""
        self.tell: Callable[[str], None] | None = None
        """Is told what is decided."""
        with programs_lock:
            programs.add(self)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self.refused or not self.lock.acquire(blocking=False):
            return self.run(inputs)
        try:
            return self._call(inputs)
        finally:
            self.lock.release()

    def _call(self, inputs: list[Any]) -> Sequence[Any]:
        if self.device.is_capturing() or _private.dispatch_modes():
            return self.run(inputs)
        if self.sizes_among_inputs is None:
            self.sizes_among_inputs = tuple(i for i, x in enumerate(inputs) if not isinstance(x, Tensor))
        key = tuple(inputs[i] for i in self.sizes_among_inputs)
        sizes = self.by_sizes.get(key)
        if sizes is None:
            if not self._may_have(key):
                return self.run(inputs)
            sizes = self.by_sizes[key] = Sizes()
        if sizes.refused:
            return self.run(inputs)
        matching = 0
        for recording in sizes.recordings:
            if recording.inputs.match(inputs):
                matching += 1
                sizes.moves = 0
                if recording.is_free():
                    return self._replay(sizes, recording, inputs)
        if not self._is_to_record(sizes, inputs, matching) or not one_records.acquire(blocking=False):
            return self._run(sizes, inputs)
        try:
            return self._record(sizes, inputs)
        finally:
            one_records.release()

    def _may_have(self, key: tuple[Any, ...]) -> bool:
        """May it be recorded with what is given beside tensors? That can be sizes, and not too many of them."""
        if any(type(x) is not int for x in key):
            self._refuse_all("an input is neither a tensor nor a size")
            return False
        return len(self.by_sizes) < SIZES

    # ---- called ----

    def _run(self, sizes: Sizes, inputs: list[Any]) -> Sequence[Any]:
        """Call the program; time it, if it is still to be decided whether replaying pays."""
        note_addresses(sizes, inputs)
        if not sizes.is_warm or self.policy.always or sizes.settled or sizes.calls.has_enough_calls():
            sizes.is_warm = True  # the first call loads and tunes kernels
            return self.run(inputs)
        return sizes.calls.call(lambda: self.run(inputs), self.device)

    # ---- recorded ----

    def _is_to_record(self, sizes: Sizes, inputs: Sequence[Any], matching: int) -> bool:
        if not sizes.is_warm:
            return False
        has_room = not sizes.is_full and len(sizes.recordings) < PLACES
        if matching:  # its results are held: that may happen once, or at every step
            sizes.times_held += 1
            return has_room and sizes.settled and matching < HELD and sizes.times_held > 1
        if sizes.recordings:
            sizes.moves += 1
            if sizes.moves >= MOVES:
                self._refuse(sizes, "its inputs move from call to call")
                return False
            return has_room and sizes.settled and not self._waits_for_another(sizes, inputs)
        if not self.policy.always:
            if not sizes.calls.is_enough(self.device):
                return False
            if reason := too_long_on_device(sizes.calls):
                self._refuse(sizes, reason)
                return False
        return not self._waits_for_another(sizes, inputs)

    def _waits_for_another(self, sizes: Sizes, inputs: Sequence[Any]) -> bool:
        """Does a backward read what a recording of its forward would keep in its place, and none does?"""
        tensors = [(i, x) for i, x in enumerate(inputs) if i in self.fixed and isinstance(x, Tensor)]
        elsewhere = [x for i, x in tensors if not self._stays(i, x)]
        if not elsewhere:
            return False
        if sizes.recordings:  # the forward of this call was not replayed
            return True
        sizes.times_waited += 1
        if sizes.times_waited <= WAITS:
            return True
        if is_large := any(x.numel() * x.element_size() >= LARGE for x in elsewhere):
            self._refuse(sizes, "what the forward saves lies elsewhere at each call")
        return is_large

    def _record(self, sizes: Sizes, inputs: list[Any]) -> Sequence[Any]:
        note_addresses(sizes, inputs)
        fixed = {
            i
            for i, x in enumerate(inputs)
            if isinstance(x, Tensor) and (self._stays(i, x) or self._seems_to_stay(sizes, i, x))
        }
        sizes.peak = max(sizes.peak, self.device.peak_memory())
        try:
            recording = Recording(self.run, inputs, self.roles, fixed, self.written, self.device)
        except NotRecordable as why:
            self._refuse(sizes, str(why))
            return self.run(inputs)
        except Exception as error:  # what cannot be recorded can still be called
            self._refuse_all(f"recording failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return self.run(inputs)
        for memory in recording.outputs.stays:
            memory_in_place[memory] = recording
        sizes.recordings.append(recording)
        if sizes.settled and (reason := self._too_much_memory(sizes)):
            sizes.recordings.pop()  # the others stay
            sizes.is_full = reason
            return self.run(inputs)
        return self._replay(sizes, recording, inputs)

    def _too_much_memory(self, sizes: Sizes) -> str | None:
        used = self.device.memory_in_use() + sum(program.idle_memory() for program in all_programs())
        return too_much_memory(used, sizes.peak, self.device.total_memory(), self.policy)

    def _stays(self, i: int, x: Tensor) -> bool:
        """Does an input stay in its place: a parameter or a buffer, or a value that a recording keeps?"""
        if _private.storage_id(x) in memory_in_place:
            return True
        # to a backward everything is fixed that the forward saved, also what lies elsewhere at each step
        return i in self.fixed and (Role.HANDED not in self.roles or isinstance(x, Parameter))

    def _seems_to_stay(self, sizes: Sizes, i: int, x: Tensor) -> bool:
        """A buffer of the user's, such as a cache of keys, that has lain in one place so far."""
        is_worth_it = i in self.written or x.numel() * x.element_size() >= LARGE
        return is_worth_it and i not in sizes.moved and Role.HANDED not in self.roles

    def idle_memory(self) -> int:
        """Bytes that are reserved for its recordings and hold nothing between two replays."""
        # lists, as another thread may add to them
        return sum(one.graph.idle_memory for sizes in list(self.by_sizes.values()) for one in list(sizes.recordings))

    # ---- replayed ----

    def _replay(self, sizes: Sizes, recording: Recording, inputs: list[Any]) -> Sequence[Any]:
        given = inputs.copy()
        inputs.clear()  # as the program does: the caller's list must not keep them
        if sizes.settled:
            return recording.replay(given)
        if self.policy.always:
            self._settle(sizes, "asked for")
            return recording.replay(given)
        if not sizes.replays.has_enough_calls():
            return sizes.replays.call(lambda: recording.replay(given), self.device)
        if sizes.replays.is_enough(self.device):
            if reason := not_faster(sizes.calls, sizes.replays) or self._too_much_memory(sizes):
                self._refuse(sizes, reason)
                return self.run(given)
            self._settle(sizes, f"{shown(sizes.replays.seconds)} instead of {shown(sizes.calls.seconds)}")
        return recording.replay(given)

    # ---- decided ----

    def _settle(self, sizes: Sizes, why: str) -> None:
        sizes.settled = True
        self._say(f"is replayed: {why}")

    def _refuse(self, sizes: Sizes, reason: str) -> None:
        sizes.refused = reason
        sizes.recordings.clear()
        self._say(f"is not replayed: {reason}")

    def _refuse_all(self, reason: str) -> None:
        self.refused = ""
        self.by_sizes.clear()
        self._say(f"is not replayed: {reason}")

    def _say(self, what: str) -> None:
        log.info("CUDA graphs: %s %s", self.name, what)
        if self.tell is not None:
            self.tell(self.verdict())

    def forget(self) -> None:
        """Drop all recordings, and decide anew."""
        self.by_sizes.clear()

    def verdict(self) -> str:
        """What has been decided, in words."""
        if self.refused:
            return f"not replayed: {self.refused}"
        found = list(self.by_sizes.values())
        if not found:
            return "not replayed: not called yet"
        if replayed := [one for one in found if one.settled and one.recordings]:
            one = replayed[0]
            timed = f": {shown(one.replays.seconds)} instead of {shown(one.calls.seconds)}" if one.calls.device else ""
            return f"replayed{timed}, {self.idle_memory() / 2**20:.0f} MB of memory for it alone"
        refused = next((one.refused for one in found if one.refused), "")
        return f"not replayed: {refused or 'called too few times'}"


programs: weakref.WeakSet[Program] = weakref.WeakSet()
"""All that may have recordings."""
programs_lock = threading.RLock()
one_records = threading.Lock()
"""Recordings share one stream of each device, and stop the garbage collector of the process meanwhile."""


def all_programs() -> list[Program]:
    with programs_lock:  # other threads may compile
        return list(programs)


def forget_recordings() -> None:
    for program in all_programs():
        program.forget()


def note_addresses(sizes: Sizes, inputs: Sequence[Any]) -> None:
    addresses = [x.data_ptr() if isinstance(x, Tensor) else 0 for x in inputs]
    if sizes.last_inputs:
        sizes.moved |= {i for i, (now, before) in enumerate(zip(addresses, sizes.last_inputs)) if now != before}
    sizes.last_inputs = addresses
