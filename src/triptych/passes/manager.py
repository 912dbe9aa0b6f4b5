"""Runs a stage: times, counts, records and checks every pass, and undoes it if need be."""

from __future__ import annotations

import copy
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from .. import _private
from ..errors import RuleError, TriptychError, VerificationError
from ..ir.fingerprint import fingerprint
from ..ir.graph_copies import GraphState
from ..ir.origins import given_tensor
from ..ir.program import Program
from ..ir.text import text
from ..pipeline import Hook, steps
from ..rewrite.driver import Tally, refusals, run_rules
from ..rewrite.passes import Pass, pass_with_options
from ..rewrite.record import Decline
from ..rewrite.rewriter import Rewriter
from ..rules.stable_topological_sort import StableTopologicalSort
from ..verify.structure import Contract, contract, interface, require_interface, verify
from .culprit import Rewrite, first_bad, last_rewrite
from .custom_passes import call_custom, custom_steps, name_of
from .node_lines import node_lines
from .record import Listing, PassRecord
from .returned_graphs import WrongResult, require_plausible_count
from .runnable import require_runnable, written
from .session import Session, is_watched
from .torch_bisector import disabled_by_bisector
from .torch_tools import timed_pass, timed_stage

if TYPE_CHECKING:
    from ..communication.timeline import Timeline
    from ..verify.numerics import NumericCheck

log = logging.getLogger("triptych")

COMMUNICATING = "post_grad"
"""The stage that changes at which points a graph communicates."""


def run_stage(
    stage: str,
    gm: GraphModule,
    session: Session,
    *,
    graph: str,
    example_inputs: Sequence[Any] = (),
    is_inference: bool = False,
) -> GraphModule:
    """Run one stage over one graph, in place; the record of every pass goes to the session."""
    with timed_stage(stage):
        return _run_stage(stage, gm, session, graph, example_inputs, is_inference)


def _run_stage(
    stage: str, gm: GraphModule, session: Session, graph: str, example_inputs: Sequence[Any], is_inference: bool
) -> GraphModule:
    entries = [e for e in steps(stage, session.options) if not session.passes_off or getattr(e, "required", False)]
    if not entries:
        return gm
    session.activity = f"running stage {stage} on the {graph} graph"
    runner = _StageRunner(stage, gm, session, graph, example_inputs, is_inference)
    verified = session.options.verify != "off" and not any(getattr(e, "changes_interface", False) for e in entries)
    before = contract(gm) if verified else None
    runner.numbers = runner.open_numbers() if verified else None
    backup = GraphState(gm) if verified and session.options.verify == "final" else None
    for entry in entries:
        if isinstance(entry, Hook):
            session.activity = f"running {entry.name} of stage {stage} on the {graph} graph"
            for custom in custom_steps(session.options, entry.name, stage):
                if isinstance(custom, Pass):
                    runner.run_pass(custom, before, entry.name)
                else:
                    runner.run_custom(entry.name, custom, before)
        else:
            session.activity = f"running pass {entry.name} of stage {stage} on the {graph} graph"
            runner.run_pass(pass_with_options(entry, session.options), before)
    if backup is not None and runner.changed:
        try:
            verify(gm, before)
            runner.check_numbers(f"stage {stage}")
        except VerificationError as error:
            gm.graph = backup.graph()
            ran = ", ".join(dict.fromkeys(r.name for r in session.records if r.changed and r.stage == stage))
            what = f"({ran}; verify='each' says which of them it was): {error}"
            if session.options.on_error == "raise":
                raise VerificationError(f"stage {stage} breaks the {graph} graph {what}") from error
            _warn(session, f"stage {stage} was undone {what}")
    if runner.timeline is not None and (after := runner.new_timeline()) is not None:
        session.timelines[graph] = (runner.timeline, after)
    if runner.changed:
        gm.recompile()
    return gm


class _StageRunner:
    def __init__(
        self, stage: str, gm: GraphModule, session: Session, graph: str, inputs: Sequence[Any], is_inference: bool
    ) -> None:
        self.stage, self.gm, self.session, self.graph = stage, gm, session, graph
        self.is_inference = is_inference
        self.inputs = inputs
        self.program = self._new_program()
        self.changed = False
        self.numbers: NumericCheck | None = None
        self.notes: set[str] = set()
        self.listing: Listing | None = None
        self.timeline = self.new_timeline() if session.observed and stage == COMMUNICATING else None
        if session.observed:
            self.listing = session.open_listing(f"{stage}/{graph}", node_lines(gm.graph))

    def run_pass(self, pass_: Pass, before: Contract | None, name: str = "") -> None:
        """Run a pass; `name` is that of the hook it was given to, if any."""
        record = self._open(name or pass_.name)
        record.required = pass_.required
        if not pass_.required and disabled_by_bisector(self.stage, record.name):
            record.note = "disabled by torch's CompilerBisector"
            self._close(record, before, None)
            return
        strict = self._is_strict(of_user=bool(name)) or pass_.required
        rewriter = Rewriter(self.program, record.name, None if pass_.required else self.session.rewrites_left)
        tally = Tally(graph=self.graph, sites=[] if self.session.observed else None)
        if not pass_.required and (reason := self.program.unreadable):
            record.declines.append(Decline(pass_.name, "", reason))
            self._close(record, before, None)
            return
        backup = GraphState(self.gm) if self.session.options.verify == "each" else None
        started = time.perf_counter()
        try:
            with timed_pass(self.stage, record.name):
                pass_.run(rewriter, strict=strict, tally=tally)
        except RuleError as error:
            if pass_.required:  # the user cannot fix this, so the compile falls back
                raise RuntimeError(str(error)) from error
            record.fired = tally.fired
            self._add_failed(record, pass_.name)
            raise
        except Exception as error:
            if strict:
                raise TriptychError(f"pass {record.name} raised {type(error).__name__}: {error}") from error
            self._failed(record, f"pass {record.name} {_raised(error)}: {error}")
        record.seconds = time.perf_counter() - started
        record.tried, record.matched, record.stop = tally.tried, tally.matched, tally.stop
        record.endless = tally.endless
        record.fired, record.decisions, record.sites = tally.fired, tally.decisions, tally.sites or []
        record.rewrites = tally.fired.total()
        record.declines = list(tally.declines.values())
        record.changed = record.rewrites > 0 or rewriter.edited
        self.session.count.stopped |= rewriter.stopped
        if tally.endless:
            self.session.warnings.append(f"pass {record.name} of stage {self.stage} was stopped at the {tally.stop}")
        if tally.failures:
            record.error = "\n".join(f"{failure}\n{failure.trace}" for failure in tally.failures.values())
            self.session.warnings += [f"{record.name}: {failure}" for failure in tally.failures.values()]
        if tally.refused and not is_watched():
            for line in refusals(tally, self.graph):
                log.warning("%s: %s", record.name, line)
        self._close(record, before, backup, pass_)

    def run_custom(self, hook: str, custom: Callable[..., Any], before: Contract | None) -> None:
        """Run a user's function of the graph. Whatever it changes counts as one rewrite, and is undone if it fails."""
        name = name_of(custom)
        record = self._open(hook)
        if self.session.rewrites_left == 0 or disabled_by_bisector(self.stage, f"{hook}: {name}"):
            self._close(record, before, None)
            return
        backup = GraphState(self.gm)
        was, had, calls = fingerprint(self.gm.graph), interface(self.gm.graph), written(self.gm.graph)
        started = time.perf_counter()
        has_returned = False
        try:
            with timed_pass(self.stage, f"{hook}: {name}"):
                returned = call_custom(custom, self.gm, self.is_inference)
            has_returned = True
            require_interface(self.gm.graph, had)
            self._put_in_order()
            self.gm.graph.lint()
            record.changed = fingerprint(self.gm.graph) != was
            require_plausible_count(returned, record.changed)
            self.program = self._new_program()
            require_runnable(self.program, calls)
        except Exception as error:
            self.gm.graph = backup.graph()
            self.program = self._new_program()
            record.changed = False
            if isinstance(error, WrongResult):
                raise RuleError(f"{hook}: {name} {error}") from error
            what = "leaves an invalid graph" if has_returned else _raised(error)
            message = f"{hook}: {name} {what}: {error}"
            if self._is_strict(of_user=True):
                self._add_failed(record, name)
                raise RuleError(message) from error
            self._failed(record, message)
        record.seconds = time.perf_counter() - started
        record.rewrites = int(record.changed)
        record.fired[name] += record.rewrites
        self._close(record, before, backup)

    def _is_strict(self, of_user: bool) -> bool:
        """Is what raises an error? Otherwise it is left out, with a warning."""
        options = self.session.options
        return options.verify == "each" or of_user and options.on_error == "raise"

    def _new_program(self) -> Program:
        program = Program(self.gm, self.inputs, self.session.options, self.is_inference)
        program.origins = self.session.origins
        if self.stage == "pre_grad":
            program.buffers = self.session.buffers
        return program

    def new_timeline(self) -> Timeline | None:
        from ..communication.timeline import timeline  # needed only if the compile is observed

        return timeline(self.gm.graph, self.session.options.link)

    def open_numbers(self) -> NumericCheck:
        from ..verify.numerics import NumericCheck  # needed only with the option `verify`

        origins = self.session.origins
        return NumericCheck(self.gm, self.inputs, given_tensor if origins is None else origins.tensor)

    def check_numbers(self, what: str) -> None:
        """Raise VerificationError if the graph computes something else than before; note what could not be compared."""
        reason = self.numbers.check() if self.numbers is not None else None
        if reason is not None and reason not in self.notes:
            self.notes.add(reason)
            note = f"verify: {self.graph}, after {what}: {reason}"
            self.session.warnings.append(note)
            log.info("%s", note)

    def _put_in_order(self) -> None:
        """Sort the graph: a user's pass may leave a value after its first use; that is repaired, not an error."""
        run_rules(Rewriter(self._new_program(), StableTopologicalSort.name), StableTopologicalSort().rules())

    def _open(self, name: str) -> PassRecord:
        record = PassRecord(self.stage, name, self.graph, nodes_before=len(self.gm.graph.nodes))
        record.ordinal = self.session.count.made
        record.listing = self.listing
        if self.listing is not None:
            record.versions = (len(self.listing.deltas),) * 2
        return record

    def _close(
        self, record: PassRecord, before: Contract | None, backup: GraphState | None, pass_: Pass | None = None
    ) -> None:
        raised: VerificationError | None = None
        if record.changed and self.session.options.verify == "each":
            raised = self._verify(record, before, backup, pass_)
        record.nodes_after = len(self.gm.graph.nodes)
        if record.changed:
            self.changed = True
            if self.listing is not None:
                record.versions = (record.versions[0], self.listing.add(node_lines(self.gm.graph, self.listing.latest)))
            _private.trace_artifact(f"triptych_{self.stage}_{record.name}_{self.graph}", lambda: text(self.gm))
            rewrites = f"{record.rewrites} rewrite{'s' * (record.rewrites != 1)}"
            log.debug("%s %s: %s in %s", self.stage, record.name, rewrites, self.graph)
        self.session.add(record)
        if raised is not None:  # only now: a bisection reads the record of the pass that failed
            raise raised

    def _verify(
        self, record: PassRecord, before: Contract | None, backup: GraphState | None, pass_: Pass | None
    ) -> VerificationError | None:
        """Check the graph after a pass. A pass that breaks something is undone and reported; with on_error="raise" it
        is an error, which is returned."""
        try:
            verify(self.gm, before)
            self.check_numbers(record.name)
        except VerificationError as error:
            assert backup is not None
            fault = self._rewrite_at_fault(record, before, backup, pass_)
            what = f"rule {fault.rule}{f' at {fault.where}' if fault.node else ''}: {error}"
            if self.session.options.on_error == "raise":
                record.error = f"verification failed: {what}"
                return VerificationError(f"pass {record.name}, {what}")
            self._go_back_to(backup)
            record.error = f"undone: {what}"
            record.declines.append(Decline(fault.rule, fault.node, f"verification failed: {error}", fault.source))
            record.rewrites, record.changed = 0, False
            record.fired.clear()
            _warn(self.session, f"pass {record.name} was undone: {what}")
        return None

    def _rewrite_at_fault(
        self, record: PassRecord, before: Contract | None, backup: GraphState, pass_: Pass | None
    ) -> Rewrite:
        """Which rewrite of a pass breaks the graph: the pass runs again on the original graph, with a limit."""
        numbers = self.numbers

        def run(limit: int) -> tuple[PassRecord, str]:
            self._go_back_to(backup)
            rewriter = Rewriter(self.program, record.name, limit)
            tally = Tally()
            if pass_ is not None:
                pass_.run(rewriter, tally=tally)
            return replace(record, fired=tally.fired, rewrites=rewriter.rewrites), text(self.gm)

        def is_bad(limit: int) -> bool:
            run(limit)
            # a copy: where random draws differ, a check takes the current graph as its new reference
            self.numbers = copy.copy(numbers)
            try:
                verify(self.gm, before)
                self.check_numbers(record.name)
            except VerificationError:
                return True
            return False

        after = text(self.gm)
        try:
            number = first_bad(is_bad, record.rewrites) if pass_ is not None else record.rewrites
            left, listing_before = run(number - 1)
            if pass_ is not None:
                record, after = run(number)
        finally:
            self.numbers = numbers
        return last_rewrite(record, left.fired, listing_before, after)

    def _go_back_to(self, state: GraphState) -> None:
        self.gm.graph = state.graph()
        self.program = self._new_program()

    def _add_failed(self, record: PassRecord, rule: str) -> None:
        """Add the record of a pass that ends the compile. What raised counts as a rewrite: a bisection names it."""
        record.error = traceback.format_exc()
        record.fired[rule] += 1
        record.rewrites = record.fired.total()
        self.session.add(record)

    def _failed(self, record: PassRecord, what: str) -> None:
        record.error = traceback.format_exc()
        _warn(self.session, f"{what}; the compile goes on without it")


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}"


def _warn(session: Session, message: str) -> None:
    session.warnings.append(message)
    log.warning("%s", message)
