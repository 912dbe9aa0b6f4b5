"""Why the rewriter, or a rule's own check, left a site alone."""

from __future__ import annotations


class Refused(Exception):
    """Not an error: a rewrite that would not be right here, with its reason."""

    @property
    def reason(self) -> str:
        return str(self)


class NotConcerned(Refused):
    """The site is none of the rule's: a miss, as if the pattern had not matched, and not worth a line in a report."""
