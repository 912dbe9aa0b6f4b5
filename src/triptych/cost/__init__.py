"""What an operation costs on a device."""

from ..ir.sizes import bytes_of, size_hint
from .device import DeviceModel, device_model
from .measure import can_measure, measured, measured_in_turns, measuring_allowed
from .timed import Layout, require_gain

__all__ = [
    "DeviceModel", "Layout", "bytes_of", "can_measure", "device_model", "measured", "measured_in_turns",
    "measuring_allowed", "require_gain", "size_hint",
]  # fmt: skip
