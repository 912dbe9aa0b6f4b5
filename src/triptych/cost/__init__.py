"""What an operation costs on a device."""

from .device import DeviceModel, device_model
from .sizes import bytes_of, size_hint

__all__ = ["DeviceModel", "bytes_of", "device_model", "size_hint"]
