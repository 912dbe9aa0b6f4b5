"""`freeze`: what is computed from weights alone is computed once, and anew when a weight has changed."""

from .freeze import freeze, warn_of_training

__all__ = ["freeze", "warn_of_training"]
