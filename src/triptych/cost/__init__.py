"""What an operation costs on a device."""

from ..ir.sizes import bytes_of, size_hint
from .device import DeviceModel, device_model
from .measure import can_measure, measured, measuring_allowed

__all__ = ["DeviceModel", "bytes_of", "can_measure", "device_model", "measured", "measuring_allowed", "size_hint"]
