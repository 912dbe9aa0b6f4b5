"""What an operation costs on a device.

A rule describes the work of the old and of the new form, `Work`, as a sum of parts, and hands both to `Match.pays`.
From that description come the modelled time with its error, the question that is put to the clock, and the answer.
"""

from ..ir.sizes import bytes_of, size_hint
from .device import DeviceModel, device_model
from .measure import can_measure, measured, measured_in_turns, measuring_allowed
from .parts import UNKNOWN, Call, Moved, Operand, Part, Product, Waiting, read_and_written
from .timed import Layout, require_gain
from .work import Work

__all__ = [
    "UNKNOWN", "Call", "DeviceModel", "Layout", "Moved", "Operand", "Part", "Product", "Waiting", "Work", "bytes_of",
    "can_measure", "device_model", "measured", "measured_in_turns", "measuring_allowed", "read_and_written",
    "require_gain", "size_hint",
]  # fmt: skip
