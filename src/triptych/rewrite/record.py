"""What the driver keeps of a site: a refusal, a rewrite, or a decision of the cost model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decline:
    """A site that a rule looked at and left alone, and why."""

    rule: str
    node: str
    reason: str
    source: str = ""
    raised: bool = False
    """Not a refusal: the rule itself failed there."""

    def __str__(self) -> str:
        where = f"  # {self.source}" if self.source else ""
        return f"{self.rule} at {self.node}: {self.reason}{where}"


@dataclass(frozen=True)
class Firing:
    """A site that was rewritten: under which name, at which node, and the user's source line."""

    rule: str
    node: str
    source: str = ""


GAIN = 0.95
"""What is left of the time must be less than this part of it: a smaller gain is within the error of a model."""


@dataclass(frozen=True)
class Decision:
    """A rewrite that could have lost: what the cost model said of both ways, in seconds."""

    before: float
    after: float
    rule: str = ""
    node: str = ""
    sure: bool = False
    """The new way is the old one with less to do, and nothing more: any gain counts."""

    @property
    def pays(self) -> bool:
        return self.after < (self.before if self.sure else GAIN * self.before)

    @property
    def refusal(self) -> str:
        return f"would cost {self}" + (", too little less to be sure of" if self.after < self.before else "")

    def __str__(self) -> str:
        return f"{self.after * 1e6:.1f} us instead of {self.before * 1e6:.1f} us"
