"""What torch loads when `torch.compile(model, backend="triptych")` asks for the name the first time.

Torch loads an entry point, then registers what it loaded, and to register a name twice is an error. Two threads whose
first compiles coincide both load it, so that one of them would fail with "duplicate name: triptych".
"""

from __future__ import annotations

from typing import Any

from . import _private

with _private.plain_torch():
    from .backend import compile_fx

__all__ = ["compile_fx"]

NAME = "triptych"


class Backends(dict[str, Any]):
    """Torch's backends by name. Ours can always be registered and always be looked up."""

    def __contains__(self, name: object) -> bool:
        """Torch asks this before it registers a name, and to learn whether it still has to."""
        return name != NAME and super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        """Another thread has marked the entry point as loaded, and is about to store what it loaded."""
        if name == NAME:
            return compile_fx
        raise KeyError(name)


_private.backend_registry._COMPILER_FNS = Backends(_private.backend_registry._COMPILER_FNS)
