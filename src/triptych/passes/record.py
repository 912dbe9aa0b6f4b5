"""What a pass did, as a value: counts, reasons, time, and the graph before and after."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from ..cost.decision import Decision
from ..rewrite.record import Decline, Firing


@dataclass(frozen=True)
class Delta:
    """One listing as the difference from another: lines kept at both ends, the middle replaced."""

    head: int
    tail: int
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @staticmethod
    def between(before: list[str], after: list[str]) -> Delta:
        head = 0
        shortest = min(len(before), len(after))
        while head < shortest and before[head] == after[head]:
            head += 1
        tail = 0
        while tail < shortest - head and before[-1 - tail] == after[-1 - tail]:
            tail += 1
        return Delta(
            head, tail, tuple(before[head : len(before) - tail]), tuple(after[head : len(after) - tail])
        )

    def apply(self, before: list[str]) -> list[str]:
        return before[: self.head] + list(self.added) + before[len(before) - self.tail :]


class Listing:
    """The text of one graph through its passes: the first version whole, then deltas."""

    def __init__(self, first: list[str]) -> None:
        self.first = first
        self.latest = first
        self.deltas: list[Delta] = []

    def add(self, lines: list[str]) -> int:
        """Append a version and return its number."""
        self.deltas.append(Delta.between(self.latest, lines))
        self.latest = lines
        return len(self.deltas)

    def versions(self) -> Iterator[list[str]]:
        """The lines of every version in order, the first one included."""
        lines = self.first
        yield lines
        for delta in self.deltas:
            lines = delta.apply(lines)
            yield lines

    def version(self, number: int) -> str:
        return "\n".join(next(itertools.islice(self.versions(), number, None)))


@dataclass(repr=False)
class PassRecord:
    """One run of one pass over one graph."""

    stage: str
    name: str
    graph: str
    nodes_before: int = 0
    nodes_after: int = 0
    tried: int = 0
    matched: int = 0
    rewrites: int = 0
    seconds: float = 0.0
    ordinal: int = 0
    """How many rewrites the session had made before this pass: the base of a bisection."""
    stop: str = ""
    endless: tuple[str, ...] = ()
    """The rules whose results were rewritten again and again, until the pass was stopped."""
    note: str = ""
    """What the counts do not say."""
    changed: bool = False
    required: bool = False
    """The pass is required: its rewrites are not part of a bisection."""
    error: str | None = None
    declines: list[Decline] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    """Rewrites by rule."""
    sites: list[Firing] = field(default_factory=list)
    """Where rules fired, if the compile is observed."""
    decisions: list[Decision] = field(default_factory=list)
    """The cost model's figures for rewrites that depended on it; a decline has its figures in its reason."""
    listing: Listing | None = field(default=None, repr=False)
    versions: tuple[int, int] = (0, 0)

    @property
    def declined(self) -> int:
        return len(self.declines)

    @property
    def reasons(self) -> Counter[str]:
        return Counter(d.reason for d in self.declines)

    @property
    def before(self) -> str:
        return self.listing.version(self.versions[0]) if self.listing else ""

    @property
    def after(self) -> str:
        return self.listing.version(self.versions[1]) if self.listing else ""

    @property
    def diff(self) -> str:
        """The lines that the pass changed, before with "-" and after with "+", and a few around them."""
        from .diff import unified  # it imports this module

        return "\n".join(unified(self.before, self.after)) if self.changed else ""

    def __repr__(self) -> str:
        place = self.stage if self.graph in ("", self.stage) else f"{self.stage}, {self.graph}"
        return f"<PassRecord {self.name} ({place}): {self._outcome()}>"

    def _outcome(self) -> str:
        rewrites = "1 rewrite" if self.rewrites == 1 else f"{self.rewrites} rewrites"
        parts = [rewrites if self.changed else "nothing changed"]
        parts += [f"{self.declined} declined"] if self.declined else []
        parts += ["FAILED"] if self.error else []
        return ", ".join([*parts, f"{self.nodes_before} -> {self.nodes_after} nodes", f"{self.seconds * 1e3:.1f} ms"])

    def _repr_html_(self) -> str:
        """For a notebook: what the pass did, and the lines it changed in colour."""
        colours = {"-": "#d13438", "+": "#107c10"}
        lines = [
            f'<span style="color: {colours[line[0]]}">{escape(line)}</span>' if line[0] in colours else escape(line)
            for line in self.diff.splitlines()
        ]
        title = f"<b>{escape(self.name)}</b> ({escape(self.stage)}, {escape(self.graph)}): {escape(self._outcome())}"
        declines = "".join(f"<li>left alone: {escape(str(decline))}</li>" for decline in self.declines)
        error = f"<pre>{escape(self.error)}</pre>" if self.error else ""
        body = f"<pre>{chr(10).join(lines)}</pre>" if lines else ""
        return f"<div>{title}{error}{body}{f'<ul>{declines}</ul>' if declines else ''}</div>"
