"""Which of two forms is faster: by the model of the device, or where that cannot tell, by the clock."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.refusal import Refusal
from .clock import Clocked, clocked
from .work import Work

GAIN = 0.95
"""The new time must be less than this fraction of the old one: a smaller gain is within the error of the cost model."""

SLOWER = 1.05
"""A rewrite that saves memory may take up to this many times as long."""


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
    spread: float = 0.0
    """How far the best rounds of a measurement lie apart, as a fraction of the time."""

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


def choose(old: Work, new: Work, tune: str, by_name: bool = False) -> Decision:
    """Is the new form faster? `tune` says when both are timed on the device: never, where the model cannot tell, or
    always. Where nothing can be timed, or the clock gives no steady answer, the model decides."""
    before, after, saves = old.seconds(), new.seconds(), max(old.held - new.held, 0)
    if before < new.too_short:
        return Decision(before, after, negligible=True)
    sure, error = new.is_part_of(old), max(old.error, new.error)
    is_unsure = not (sure or by_name) and before < error * after and after < error * before
    times: tuple[Clocked, Clocked] | None = None
    if tune == "all" or (tune == "unsure" and is_unsure):
        times = clocked(old, new)
    if times is None:
        return Decision(before, after, sure=sure, saves=saves, by_name=by_name)
    spread = max(time.spread for time in times)
    return Decision(times[0].seconds, times[1].seconds, measured=True, saves=saves, by_name=by_name, spread=spread)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
