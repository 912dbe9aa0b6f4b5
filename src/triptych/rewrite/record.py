"""What the driver records about a site: a refusal, or a rewrite."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from torch.fx import Node

from ..ir.refusal import Refusal, words
from ..ir.text import source_line


def brief(record: Any) -> str:
    """The repr of a dataclass without the fields that have their defaults."""
    shown = [
        f"{field.name}={value!r}"
        for field in fields(record)
        if (value := getattr(record, field.name)) != field.default
    ]
    return f"{type(record).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Decline:
    """A site that a rule examined and left alone, and why. It stores names, not nodes: it outlives the graph."""

    rule: str
    node: str
    """The value that the rule would have replaced."""
    reason: str
    source: str = ""
    """The user's source line of the node at fault."""
    raised: bool = False
    """Not a refusal: the rule itself failed there."""
    at: str = ""
    """The node at fault, if that is another one than `node`."""
    wanted: str = ""
    found: str = ""
    matched: int = 0
    """How many nodes of the rule's pattern matched, or how many nodes the site covers."""
    complete: bool = True
    """The whole pattern matched, and a check or the rewriter declined."""
    graph: str = ""
    """The graph it is in, where a record does not say so."""

    @staticmethod
    def of(refusal: Refusal, rule: str, root: Node, covered: int = 0, raised: bool = False, graph: str = "") -> Decline:
        """The refusal of a site that begins at `root`; `covered`: how many nodes a complete match has."""
        at = refusal.node
        if at is None or at._erased:  # a node that the rewrite added, erased with it
            at = root
        wanted, found = ("" if value is None else words(value) for value in (refusal.wanted, refusal.found))
        return Decline(
            rule, root.name, refusal.reason, source_line(at) or source_line(root), raised,
            at.name if at is not root else "", wanted, found,
            covered if refusal.matched is None else refusal.matched, refusal.matched is None, graph,
        )  # fmt: skip

    @property
    def fault(self) -> str:
        """The name of the node at fault."""
        return self.at or self.node

    def __str__(self) -> str:
        graph = f" ({self.graph})" if self.graph else ""
        how_far = "" if self.complete else f"matched {self.matched} of its nodes; "
        is_named = not self.at or re.search(rf"\b{re.escape(self.at)}\b", self.reason)
        at = "" if is_named else f", at {self.at}"
        return f"{self.rule} at {self.node}{graph}: {how_far}{self.reason}{at}{_comment(self.source)}"

    __repr__ = brief


@dataclass(frozen=True, repr=False)
class Firing:
    """A site that was rewritten: under which name, at which node, and the user's source line."""

    rule: str
    node: str
    source: str = ""
    graph: str = ""
    """The graph it is in, where a record does not say so."""
    removed: tuple[str, ...] = ()
    """Names of the nodes that the rewrite erased."""
    created: tuple[str, ...] = ()
    """Names of the nodes that it put in their place."""

    def __str__(self) -> str:
        graph = f" ({self.graph})" if self.graph else ""
        return f"{self.rule} at {self.node}{graph}: fires{_comment(self.source)}"

    __repr__ = brief


def _comment(source: str) -> str:
    return f"  # {source}" if source else ""
