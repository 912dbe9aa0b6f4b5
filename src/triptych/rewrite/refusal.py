"""Why the rewriter, or a rule's own check, left a site alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from ..ir.refusal import Refusal

if TYPE_CHECKING:
    from ..ir.program import Value


class Refused(Exception):
    """Not an error: a rewrite that would not be right here, with its reason."""

    def __init__(
        self, reason: str | Refusal = "", *, at: Node | Value | None = None, wanted: Any = None, found: Any = None
    ) -> None:
        super().__init__(reason, at, wanted, found)

    @property
    def refusal(self) -> Refusal:
        """As data; made here, because most refusals are misses that nobody asks about."""
        reason, *data = self.args
        return reason if isinstance(reason, Refusal) else Refusal(reason, *data)

    @property
    def reason(self) -> str:
        return self.refusal.reason

    def __str__(self) -> str:
        return self.reason


class NotConcerned(Refused):
    """The site is none of the rule's: a miss, as if the pattern had not matched, and not worth a line in a report."""
