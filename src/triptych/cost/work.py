"""A form of a program as the work that a device does for it, and what that costs by the model of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from .device import DeviceModel, device_model, nominal_model
from .parts import MODEL_ERROR, UNKNOWN, Part

Parts: TypeAlias = "Part | Work | Iterable[Parts]"
"""What work is put together from: parts, or lists of them of any depth."""


@dataclass(frozen=True)
class Work:
    """What a device computes for one form of a program, part by part."""

    device: torch.device
    parts: tuple[Part, ...] = ()
    held: int = 0
    """Bytes that this form keeps in memory at the peak, beyond what every form keeps."""
    too_short: float = 0.0
    """A form that is compared with one of less than this many seconds is used whichever is faster."""
    by_clock: bool = True
    """May it be timed on the device? Otherwise the model decides."""
    on_every_rank: bool = False
    """The decision must be the same on all ranks, whose devices may differ: it is modelled for a usual device."""

    @classmethod
    def of(cls, device: torch.device, *parts: Parts, **how: object) -> Work:
        return cls(device, **how) + parts  # type: ignore[arg-type]

    def __add__(self, more: Parts) -> Work:
        if isinstance(more, Work):
            return replace(self, parts=self.parts + more.parts, held=self.held + more.held)
        return replace(self, parts=self.parts + tuple(_flat(more)))

    def __mul__(self, times: int) -> Work:
        return replace(self, parts=self.parts * times)

    __rmul__ = __mul__

    @property
    def bytes(self) -> float:
        """Read and written in memory."""
        return sum(part.bytes for part in self.parts)

    @property
    def flops(self) -> float:
        """Floating-point operations of products."""
        return sum(part.flops for part in self.parts)

    @property
    def launches(self) -> int:
        return sum(part.launches for part in self.parts)

    @property
    def calls(self) -> int:
        """Of operators written in Python."""
        return sum(part.through_python for part in self.parts)

    @property
    def error(self) -> float:
        """The factor by which the modelled time may be wrong."""
        return max((part.error for part in self.parts), default=MODEL_ERROR)

    @property
    def model(self) -> DeviceModel:
        return nominal_model(self.device) if self.on_every_rank else device_model(self.device)

    def seconds(self, model: DeviceModel | None = None) -> float:
        """Modelled seconds: the device computes one part after the other, while the host calls operators."""
        model = model or self.model
        return max(sum(part.modelled(model) for part in self.parts), self.calls * model.operator)

    def is_part_of(self, other: Work) -> bool:
        """Does this form take fewer launches and no more of anything, by the same kinds of kernels? Then it is faster
        without any doubt. As many launches that move less are not enough: the code generator may fuse them otherwise.
        """
        if UNKNOWN in (self.error, other.error):
            return False
        less = all(getattr(self, what) <= getattr(other, what) for what in ("bytes", "flops", "launches", "calls"))
        kinds, new = {part.kind for part in other.parts}, Counter(self.parts) - Counter(other.parts)
        return less and (not new or self.launches < other.launches) and all(part.kind in kinds for part in new)


def _flat(more: Parts) -> Iterable[Part]:
    if isinstance(more, Part):
        yield more
    elif isinstance(more, Work):
        yield from more.parts
    else:
        for one in more:
            yield from _flat(one)
