"""Which operation a refusal is about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.fx import Node

from ..rewrite.refusal import Refused


@contextlib.contextmanager
def blaming(node: Node) -> Iterator[None]:
    """Context in which a refusal that names no node is made to name this one."""
    try:
        yield
    except Refused as refused:
        if refused.refusal.at is not None:
            raise
        raise type(refused)(refused.refusal.blaming(node)) from None
