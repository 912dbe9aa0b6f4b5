"""Errors a user can meet, each with what to do about it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

ALL_PASSES = "triptych passes --no-run"
"""The command that lists all passes."""


class TriptychError(Exception):
    """Base of every error this package raises on purpose."""


class UnknownName(TriptychError, ValueError):
    """A name nobody knows, with the names that come nearest."""

    MOST_LISTED = 40
    """Where no name comes near, all are listed if there are no more than this."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "", lister: str = "") -> None:
        """`hint`: what to do, in place of the names that come nearest. `lister`: the command that lists all names."""
        self.kind, self.name = kind, name
        names = sorted({n for n in known if n != name})
        self.near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
        if not self.near:
            self.near = [n for n in names if str(name).lower() in n.lower()][:3]
        super().__init__(f"unknown {kind} {name!r}; {hint or self._names(names, lister)}")

    def _names(self, known: list[str], lister: str) -> str:
        if self.near:
            return "did you mean " + " or ".join(repr(n) for n in self.near) + "?"
        if len(known) > self.MOST_LISTED:
            listed = f"; {lister!r} lists them" if lister else ""
            return f"none of the {len(known)} known names is similar{listed}"
        return "known: " + ", ".join(known)


def in_one_line(error: BaseException) -> str:
    """An error's class and the beginning of its message. Dynamo's messages say in the second line what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = dynamo_reason(str(error))
    return f"{type(error).__name__}: {explained if explained else ' '.join(lines[:2])}"


def dynamo_reason(text: str) -> str:
    """What Dynamo could not trace: the first line, and the explanation that follows, without the hints; empty for any
    other text."""
    first, _, rest = text.strip().partition("\n")
    explained = re.match(r"\s*Explanation: (.+)", rest)
    if explained is None:
        return ""
    sentence = re.sub(r" [(]has_kwargs \w+[)]$", "", explained[1].strip())
    return f"{first}: {sentence}"


class VerificationError(TriptychError):
    """A graph that breaks an invariant after a pass ran over it."""


class RuleError(TriptychError):
    """A rule or a user's pass that raised, named with its pass, node and source line."""


class UnsupportedTorch(TriptychError, ImportError):
    """A torch that is too old, or so new that it has moved or dropped a private name the package needs."""
