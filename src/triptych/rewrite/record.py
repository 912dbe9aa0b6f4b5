"""What the driver records about a site: a refusal, a rewrite, or a decision of the cost model."""

from __future__ import annotations

import re
from collections.abc import Callable
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


GAIN = 0.95
"""The new time must be less than this fraction of the old one: a smaller gain is within the error of the cost model."""

SLOWER = 1.05
"""A rewrite that saves memory may take up to this many times as long."""

MODEL_ERROR = 1.5
"""The factor by which the cost model of a device may be wrong about the ratio of two costs."""


@dataclass(frozen=True)
class Decision:
    """A rewrite that is not always faster: the costs of the old and the new form, in seconds."""

    before: float
    after: float
    rule: str = ""
    node: str = ""
    sure: bool = False
    """The new form does part of the work of the old one and nothing else, so any gain counts."""
    measured: bool = False
    """Timed on the device, not modelled."""
    saves: int = 0
    """By how many bytes the new form lowers the peak memory; in return it may be a little slower."""
    negligible: bool = False
    """So little time that the new form is used whichever is faster."""
    by_name: bool = False
    """The user added the pass by name to get this form, so it is used whichever is faster."""

    @property
    def most(self) -> float:
        """The new form must cost less than this."""
        if self.saves:
            return SLOWER * self.before
        return self.before if self.sure else GAIN * self.before

    @property
    def pays(self) -> bool:
        return self.negligible or self.by_name or self.after < self.most

    @property
    def refusal(self) -> Refusal:
        unsure = ", too small a gain to be sure of" if self.after < self.before and not self.saves else ""
        sentence = f"would cost {{found}} instead of {_microseconds(self.before)}{unsure}, {self.source}"
        return Refusal(sentence, wanted=f"less than {_microseconds(self.most)}", found=_microseconds(self.after))

    @property
    def matters(self) -> bool:
        """A slower form that was used because both are so short is nothing to report."""
        return self.after < self.before or not self.negligible

    def __str__(self) -> str:
        if not self.matters:
            costs = f"{_microseconds(self.before)} before, {_microseconds(self.after)} after"
            return f"too short to matter: {costs}, {self.source}"
        told = f"{_microseconds(self.after)} instead of {_microseconds(self.before)}"
        return ", ".join([told, *self.reasons, self.source])

    @property
    def reasons(self) -> list[str]:
        """Why the new form may be used although it is not faster."""
        reasons = [f"saves {self.saves / 2**20:.0f} MiB"] if self.saves else []
        if self.by_name and self.after >= self.most:
            reasons.append("used because it was added by name")
        return reasons

    @property
    def source(self) -> str:
        return "measured" if self.measured else "modelled"


def decide(
    before: float,
    after: float,
    tune: str,
    *,
    sure: bool = False,
    measure: Callable[[], tuple[float, float] | None] | None = None,
    error: float = MODEL_ERROR,
    saves: int = 0,
    by_name: bool = False,
) -> Decision:
    """Decide by modelled costs, or by measured ones; the parameters are those of `Match.pays`."""
    is_unsure = not (sure or by_name) and before < error * after and after < error * before
    if measure is not None and (tune == "all" or (tune == "unsure" and is_unsure)):
        if (times := measure()) is not None:
            return Decision(*times, measured=True, saves=saves, by_name=by_name)
    return Decision(before, after, sure=sure, saves=saves, by_name=by_name)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
