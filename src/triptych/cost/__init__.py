"""What an operation costs on a device."""

from .device import DeviceModel, device_model
from .measure import can_measure, measured, measuring_allowed
from .sizes import bytes_of, size_hint

__all__ = ["DeviceModel", "bytes_of", "can_measure", "device_model", "measured", "measuring_allowed", "size_hint"]
