"""What an operation costs on a device.

A rule describes the work of the old and of the new form, `Work`, as a sum of parts, and hands both to `Match.pays`.
From that description come the modelled time with its error, the question that is put to the clock, and the answer.
"""

from ..ir.sizes import bytes_of, size_hint
from .device import DeviceModel, device_model
from .parts import UNKNOWN, Moved, Operand, OperatorCall, Part, Product, Waiting, read_and_written
from .work import Work

__all__ = [
    "UNKNOWN", "OperatorCall", "DeviceModel", "Moved", "Operand", "Part", "Product", "Waiting", "Work", "bytes_of",
    "device_model", "read_and_written", "size_hint",
]  # fmt: skip
