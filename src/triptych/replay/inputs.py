"""Which inputs of a recorded program stay where they are, and which are copied to where the graph reads them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _private
from .device import Device

ALIGNMENT = 16
"""Bytes. Kernels are generated for inputs whose addresses are multiples of this."""


class NotRecordable(Exception):
    """Why a program cannot be recorded."""


class Inputs:
    """The inputs of one recording.

    Fixed ones are read and written in place; a call whose tensors lie elsewhere does not match. The others are copied
    into memory that belongs to the recording, and copied back if the program writes them.
    """

    def __init__(self, given: list[Any], fixed: Collection[int], written: Collection[int], device: Device) -> None:
        self.device = device
        tensors = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
        if any(given[i].device != device.device for i in tensors):
            raise NotRecordable("an input is on another device")
        self.fixed = [i for i in tensors if i in fixed and given[i].data_ptr() % ALIGNMENT == 0]
        self.addresses = [x.data_ptr() if isinstance(x, Tensor) else 0 for x in given]
        self.copied = tuple(i for i in tensors if i not in self.fixed)
        self.tensors = tuple(tensors)
        self.layouts = layouts_of([given[i] for i in tensors])
        with torch.inference_mode(False), torch.no_grad():
            self.memory = {i: room_for(given[i], device) for i in self.copied}
        self.places = [without_repeats(self.memory[i]) for i in self.copied]
        self.expanded = any(place is not self.memory[i] for place, i in zip(self.places, self.copied))
        self.written = tuple((n, i) for n, i in enumerate(self.copied) if i in written)
        # a later part of the program writes the input that this part returns: it must be the caller's, not our copy
        self.returned = sorted({*self.fixed, *(i for _, i in self.written)})

    def for_recording(self, given: Sequence[Any]) -> list[Any]:
        """The inputs to record the program with."""
        return [self.memory.get(i, x) for i, x in enumerate(given)]

    def match(self, given: list[Any]) -> bool:
        """Do fixed inputs lie where they lay, and does every tensor have the layout that was recorded?"""
        if not self.device.lie_at(given, self.addresses, self.fixed):
            return False
        return self.layouts is None or self.layouts.check(*[given[i] for i in self.tensors])

    def copy_in(self, given: Sequence[Any]) -> None:
        copied = [given[i] for i in self.copied]  # of the layouts that were recorded
        copy_all(self.places, [without_repeats(x) for x in copied] if self.expanded else copied)

    def copy_back(self, given: Sequence[Any]) -> None:
        for n, i in self.written:
            without_repeats(given[i]).copy_(self.places[n])


def layouts_of(tensors: Sequence[Tensor]) -> Any:
    """What compares the layouts of later tensors with those of these, in one call."""
    if not tensors:
        return None
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided for x in tensors):
        raise NotRecordable("an input is not a plain tensor")
    return _private.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    )


def room_for(x: Tensor, device: Device) -> Tensor:
    return device.empty(x.size(), x.stride(), x.dtype)


def without_repeats(x: Tensor) -> Tensor:
    """The tensor without the repetitions of an expanded dimension, which cannot be written one by one."""
    for dim, (size, stride) in enumerate(zip(x.size(), x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    if _private.overlaps_itself(x) == 1:
        raise NotRecordable("an input overlaps itself")
    return x


def copy_all(to: list[Tensor], of: list[Tensor]) -> None:
    """Copy in as few launches as possible."""
    if len(to) == 1:
        to[0].copy_(of[0])
    elif to:
        _private.copy_each(to, of)
