"""What a pass is: a name, a purpose, options, rules or a `run` of its own, and examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ..errors import RuleError
from ..ir.program import Program
from ..ir.text import line, source_line
from ..options import Options
from ..rewrite.checks import PLAIN, Terms
from ..rewrite.driver import Tally, run_rules
from ..rewrite.emit import Emitter
from ..rewrite.record import Decision, Decline
from ..rewrite.refusal import Refused
from ..rewrite.rewriter import Rewriter
from ..rewrite.rule import Rule


@dataclass
class PassRun:
    """One run of one pass: what it may look at and change. Options reach it as values."""

    rewriter: Rewriter
    options: Options
    is_inference: bool = False
    strict: bool = False
    """A rule that raises is an error instead of a skipped rewrite."""
    tally: Tally = field(default_factory=Tally)

    @property
    def program(self) -> Program:
        return self.rewriter.program

    @property
    def spent(self) -> bool:
        """The limit of rewrites is reached; a pass that does not go through `replace` asks for itself."""
        return not self.rewriter.has_room()

    def fired(self, what: str) -> None:
        """Count a change made by a pass that is not made of rules."""
        self.tally.fired[what] += 1
        self.rewriter.counted()

    def declined(self, what: str, node: Node, reason: str) -> None:
        self.tally.declines[what, node.name] = Decline(what, node.name, reason, source_line(node))

    def pays(self, what: str, node: Node, before: float, after: float, sure: bool = False) -> bool:
        """Does the cost model say that the new way is quicker? Both figures, in seconds, are kept either way."""
        decision = Decision(before, after, what, node.name, sure)
        if decision.pays:
            self.tally.decisions.append(decision)
        else:
            self.declined(what, node, decision.refusal)
        return decision.pays

    def replace(
        self,
        what: str,
        old: Node | Sequence[Node],
        make: Callable[[Emitter], Any],
        before: Node | None = None,
        covered: Sequence[Node] = (),
        terms: Terms = PLAIN,
    ) -> bool:
        """Put what `make` builds where `old` stands, and count it; if that is not right, keep the reason."""
        site = old if isinstance(old, Node) else old[0]
        op = self.rewriter.emitter(before or site, what)

        def edit() -> None:
            try:
                self.rewriter.replace(old, make(op), op, covered, terms)
            except Exception:
                op.discard()
                raise

        if done := self.attempt(what, site, edit):
            self.fired(what)
        return done

    def attempt(self, what: str, site: Node, edit: Callable[[], None]) -> bool:
        """Make an edit; if it is refused, or fails and so undoes itself, keep the reason."""
        try:
            edit()
        except Refused as refused:
            self.declined(what, site, refused.reason)
            return False
        except Exception as error:
            if self.strict:
                raise RuleError(
                    f"pass {self.rewriter.pass_name}, {what}: {error}\n  at {line(site)}"
                ) from error
            self.declined(what, site, f"raised {type(error).__name__}: {error}")
            self.tally.errors.append(f"{what} raised {type(error).__name__}: {error} at {site.name}")
            return False
        return True

    def run_rules(self, rules: Sequence[Rule]) -> None:
        """Run rules to a fixpoint, less those the user removed by name."""
        kept = [r for r in rules if r.name not in self.options.remove_passes]
        run_rules(self.rewriter, kept, strict=self.strict, tally=self.tally)


