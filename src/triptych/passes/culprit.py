"""The one rewrite out of many after which something is wrong: how to search for it, and what it changed."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .record import PassRecord


def first_bad(is_bad: Callable[[int], bool], last: int) -> int:
    """The smallest n for which the result of the first n rewrites is bad.

    The result without any rewrite must be good, and that of the first `last` rewrites bad.
    """
    good, bad = 0, last
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return bad


@dataclass(frozen=True)
class Rewrite:
    """One rewrite: the pass and rule that made it, and the graph before and after."""

    number: int
    """Its place among all rewrites of the run, from 1."""
    stage: str
    graph: str
    pass_name: str
    rule: str
    before: str
    after: str

    @property
    def changes(self) -> list[str]:
        """The lines that differ, `-` before and `+` after."""
        compared = difflib.ndiff(self.before.splitlines(), self.after.splitlines())
        return [line for line in compared if line[:1] in "-+"]

    @property
    def node(self) -> str:
        """The last node that was removed; if none was, one whose operands changed, or a new one."""
        changes = [(line[0], _name(line[2:])) for line in self.changes if " = " in line]
        new = {name for sign, name in changes if sign == "+"}
        old = [name for sign, name in changes if sign == "-"]
        names = [name for name in old if name not in new] or old or sorted(new)
        return names[-1] if names else ""

    @property
    def source(self) -> str:
        """The user's source line of that node, as `file.py:31`, or nothing."""
        for line in reversed(self.changes):
            if line[2:].startswith((f"{self.node}:", f"{self.node} ")) and (location := re.search(r"  # (\S+)", line)):
                return location[1]
        return ""

    @property
    def where(self) -> str:
        return self.node + (f" ({self.source})" if self.source else "")


def _name(line: str) -> str:
    return re.split(r"[: ]", line, maxsplit=1)[0]


def last_rewrite(record: PassRecord, fired_before: Counter[str], before: str, after: str) -> Rewrite:
    """The last rewrite of a pass, given what had fired before it and the graph before and after it."""
    more = Counter(record.fired)
    more.subtract(fired_before)
    rules = [name for name, count in more.items() if count > 0]
    return Rewrite(
        record.ordinal + record.rewrites,
        record.stage,
        record.graph,
        record.name,
        ", ".join(rules) or record.name,
        before,
        after,
    )
