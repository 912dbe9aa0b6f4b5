"""Have all ranks compiled the same collectives, in the same order?

A rank that runs another collective than the others waits for ever, and so do they. With the option `spmd_check` the
ranks of each process group compare what they compiled before they run it, over the store that the process groups were
made with: no collective is needed, so the comparison itself cannot hang in one. The first rank of a group compares and
writes the verdict; every rank reads it, and every rank raises if it is bad.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import timedelta
from typing import Any

from torch.fx import Graph

from . import _private
from .errors import TriptychError
from .ir.collectives import communications

GOOD = "the same"

_checked: Counter[str] = Counter()
"""How many graphs with collectives of a group this process has compiled, by the name of the group."""


class DifferentCollectives(TriptychError):
    """Ranks of one process group have compiled different collectives, or not all of them have compiled in time."""


def sequences(graph: Graph) -> dict[str, list[str]]:
    """The collectives of a graph as text, in order, by the name of their process group."""
    found: dict[str, list[str]] = {}
    for group, signature in communications(graph):
        found.setdefault(group, []).append(signature)
    return found


def require_same_collectives(graph: Graph, seconds: float) -> None:
    """Raise on every rank of a group unless all of them come here, in that time, with the same collectives."""
    for name, sequence in sequences(graph).items():
        group = _private.resolve_process_group(name)
        number = _checked[name]
        _checked[name] += 1
        verdict = _verdict(_private.default_store(), f"triptych/{name}/{number}", group, sequence, seconds)
        if verdict != GOOD:
            raise DifferentCollectives(
                f"process group {name!r}: {verdict}. Every rank must compile the same program; this rank compiled:\n  "
                + "\n  ".join(sequence)
            )


def _verdict(store: Any, prefix: str, group: Any, sequence: list[str], seconds: float) -> str:
    digest = hashlib.sha256("\n".join(sequence).encode()).hexdigest()
    keys = [f"{prefix}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], f"{digest} {len(sequence)}")
    if group.rank() == 0:
        verdict = _compare(store, keys, seconds)
        store.set(f"{prefix}/verdict", verdict)
        return verdict
    # the first rank may come here last, and then waits for others
    if not _arrived(store, [f"{prefix}/verdict"], 2 * seconds):
        return f"rank 0 has not compiled such a graph within {2 * seconds:g} s"
    return str(store.get(f"{prefix}/verdict").decode())


def _compare(store: Any, keys: list[str], seconds: float) -> str:
    if not _arrived(store, keys, seconds):
        late = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return f"rank {', '.join(late[:8])} has not compiled such a graph within {seconds:g} s"
    digests = [value.decode() for value in store.multi_get(keys)]
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return GOOD
    counts = [digest.split()[1] for digest in (digests[0], digests[other])]
    return f"ranks 0 and {other} have compiled different collectives, {counts[0]} and {counts[1]} of them"


def _arrived(store: Any, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # the class of what a store raises has changed its name more than once
        return False
    return True
