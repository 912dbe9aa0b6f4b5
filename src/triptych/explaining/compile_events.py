"""The steps of a compile, as torch names them when it times them for its trace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from .. import _private

Listener = Callable[[str, bool], None]
"""Called with the name of a step, and whether it begins or ends."""


class CompileEvents:
    """Tells listeners when a step of a compile begins and ends, by the name that torch gives it in its trace.

    Torch writes every step that `dynamo_timed` times into one log, on the thread that compiles. A release that has no
    such log tells nothing. The methods of the log are wrapped only as long as somebody listens.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._originals: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Call `listener(name, begins)` at the beginning and at the end of every step."""
        with self._lock:
            self._listeners += (listener,)
            if not self._originals:
                self._wrap(begins=True)
                self._wrap(begins=False)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one != listener)
            if not self._listeners:
                for name, original in self._originals.items():
                    setattr(self._log(), name, original)
                self._originals.clear()

    @staticmethod
    def _log() -> Any:
        return getattr(_private.dynamo_utils, "ChromiumEventLogger", None)

    def _wrap(self, begins: bool) -> None:
        name = "log_event_start" if begins else "log_event_end"
        original = getattr(self._log(), name, None)
        if original is None:
            return

        @functools.wraps(original)
        def log_event(log: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
            for listener in self._listeners:
                listener(event_name, begins)
            return original(log, event_name, *args, **kwargs)

        self._originals[name] = original
        setattr(self._log(), name, log_event)


compile_events = CompileEvents()
