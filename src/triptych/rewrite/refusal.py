"""Why the rewriter, or a rule's own check, left a site alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from ..ir.refusal import Refusal

if TYPE_CHECKING:
    from ..ir.program import Value


class Refused(Exception):
    """Not an error: the rewrite is not made here, for the reason given."""

    def __init__(
        self, reason: str | Refusal = "", *, at: Node | Value | None = None, wanted: Any = None, found: Any = None
    ) -> None:
        super().__init__(reason, at, wanted, found)

    @property
    def refusal(self) -> Refusal:
        """The refusal as data; built on demand, because most refusals are misses that are never read."""
        reason, *data = self.args
        return reason if isinstance(reason, Refusal) else Refusal(reason, *data)

    @property
    def reason(self) -> str:
        return self.refusal.reason

    def __str__(self) -> str:
        return self.reason


class Declined(Refused):
    """A refusal by a condition of the rule itself, not by the rewriter."""


class NotConcerned(Refused):
    """The rule does not apply to the site: a miss, as if the pattern had not matched, which reports do not list."""
