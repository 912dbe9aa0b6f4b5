"""Measurements on this machine, stored between runs in small JSON files, which are never unpickled or executed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("triptych")

CONFIGURATIONS = "configurations.json"
"""The quickest configurations of our Triton kernels."""

_warned: set[str] = set()


def read_store(name: str) -> dict[str, Any]:
    """The entries of a file; none, with a warning, if it cannot be read."""
    try:
        text = store_path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        _warn_once(f"{name} cannot be read, so what it says is measured again: {error}")
        return {}
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        _warn_once(f"{store_path(name)} is damaged, so what it says is measured again: {error}")
        return {}
    return entries if isinstance(entries, dict) else {}


def add_to_store(name: str, key: str, value: Any) -> None:
    """Add an entry to a file. The new content is written to a temporary file and moved into place: an interrupted
    process leaves the old file, and another process that reads meanwhile never sees part of one. Processes that write
    at once, such as the ranks of a training, take turns, so that no entry is lost."""
    try:
        path = store_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            content = json.dumps({**read_store(name), key: value}, indent=1)
            handle, aside = tempfile.mkstemp(prefix=name, dir=path.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(content)
                os.replace(aside, path)
            except BaseException:
                os.unlink(aside)
                raise
    except (OSError, RuntimeError) as error:
        _warn_once(f"a measurement cannot be kept in {name}, so the next process measures again: {error}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time is inside, where the file system has locks."""
    with open(path.with_suffix(".lock"), "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def store_path(name: str) -> Path:
    """Where measurements are stored between runs. Raises RuntimeError if the user has no home directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triptych" / name


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)
