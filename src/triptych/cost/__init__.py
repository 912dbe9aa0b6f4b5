"""What an operation costs on a device."""

from .device import DeviceModel, device_model
from .measure import can_measure, measured
from .sizes import bytes_of, size_hint

__all__ = ["DeviceModel", "bytes_of", "can_measure", "device_model", "measured", "size_hint"]
