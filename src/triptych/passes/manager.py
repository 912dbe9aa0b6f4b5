"""How a stage runs: every pass timed, counted, recorded, checked and, if need be, undone from outside."""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from .. import _private
from ..errors import RuleError, TriptychError, VerificationError
from ..ir.copies import copy_graph
from ..ir.fingerprint import fingerprint
from ..ir.numbers import Numbers
from ..ir.origins import given_tensor
from ..ir.program import Program
from ..ir.text import lines, text
from ..ir.verify import Contract, contract, verify
from ..joint.stable_topological_sort import StableTopologicalSort
from ..pipeline import Hook, steps
from ..rewrite.rewriter import Rewriter
from .base import Pass, PassRun, pass_with_options
from .record import Decline, Listing, PassRecord
from .session import Session

log = logging.getLogger("triptych")


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
    if session.passes_off:
        return gm
    session.activity = f"running stage {stage} on the {graph} graph"
    runner = _StageRunner(stage, gm, session, graph, example_inputs, is_inference)
    before = contract(gm) if session.options.verify != "off" else None
    runner.numbers = runner.open_numbers() if session.options.verify != "off" else None
    backup = copy_graph(gm) if session.options.verify == "final" else None
    for entry in steps(stage, session.options):
        if isinstance(entry, Hook):
            session.activity = f"running {entry.name} of stage {stage} on the {graph} graph"
            for custom in session.options.custom_passes(entry.name):
                runner.run_custom(entry.name, custom, before)
        else:
            session.activity = f"running pass {entry.name} of stage {stage} on the {graph} graph"
            runner.run_pass(pass_with_options(entry, session.options), before)
    if backup is not None and runner.changed:
        try:
            verify(gm, before)
            runner.check_numbers(f"stage {stage}")
        except VerificationError as error:
            gm.graph = backup
            ran = ", ".join(dict.fromkeys(r.name for r in session.records if r.changed and r.stage == stage))
            _warn(session, f"stage {stage} was undone ({ran}; verify='each' says which of them it was): {error}")
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
        self.program = Program(gm, inputs, session.options.freeze)
        self.changed = False
        self.numbers: Numbers | None = None
        self.notes: set[str] = set()
        self.listing: Listing | None = None
        if session.observed:
            key = f"{stage}/{graph}"
            self.listing = session.listings.setdefault(key, Listing(lines(gm.graph)))

    def run_pass(self, pass_: Pass, before: Contract | None) -> None:
        rewriter = Rewriter(self.program, pass_.name, self.session.rewrites_left)
        strict = self.session.options.verify == "each"
        run = PassRun(rewriter, self.session.options, self.is_inference, strict)
        record = self._open(pass_.name)
        if reason := self.program.unreadable:
            record.declines.append(Decline(pass_.name, "", reason))
            self._close(record, before, None)
            return
        backup = copy_graph(self.gm) if strict else None
        started = time.perf_counter()
        try:
            pass_.run(run)
        except RuleError:
            raise
        except Exception as error:
            if strict:
                raise TriptychError(f"pass {pass_.name} raised {type(error).__name__}: {error}") from error
            self._failed(record, f"pass {pass_.name}", error)
        record.seconds = time.perf_counter() - started
        tally = run.tally
        record.tried, record.matched, record.stop = tally.tried, tally.matched, tally.stop
        record.fired, record.decisions = tally.fired, tally.decisions
        record.rewrites = tally.fired.total()
        record.declines = list(tally.declines.values())
        record.changed = record.rewrites > 0 or rewriter.rewrites > 0
        for problem in tally.errors:
            record.error = problem
            self.session.warnings.append(f"{pass_.name}: {problem.partition(chr(10))[0]}")
        self._close(record, before, backup)

    def run_custom(self, hook: str, custom: Callable[..., Any], before: Contract | None) -> None:
        """A user's pass: a function of the graph, told `is_inference` if it asks; undone if it fails."""
        name = getattr(custom, "__name__", type(custom).__name__)
        record = self._open(hook)
        backup = copy_graph(self.gm)
        was = fingerprint(self.gm.graph)
        started = time.perf_counter()
        try:
            if isinstance(custom, (Pass, type)):
                raise TriptychError(f"{hook} takes a function of the graph; add a Pass to the pipeline instead")
            wants_module = _wants_module(custom)
            asks = "is_inference" in inspect.signature(custom).parameters
            extra = {"is_inference": self.is_inference} if asks else {}
            result = custom(self.gm if wants_module else self.gm.graph, **extra)
            if isinstance(result, GraphModule) and result is not self.gm:
                self.gm.graph = result.graph
            elif isinstance(result, Graph) and result is not self.gm.graph:
                self.gm.graph = result
            self._put_in_order()
            self.gm.graph.lint()
        except Exception as error:
            self.gm.graph = backup
            if self.session.options.verify == "each":
                raise RuleError(f"{hook}: {name} raised {type(error).__name__}: {error}") from error
            self._failed(record, f"{hook}: {name}", error)
        record.seconds = time.perf_counter() - started
        record.changed = fingerprint(self.gm.graph) != was
        record.rewrites = int(record.changed)
        record.fired[name] += record.rewrites
        self.program = Program(self.gm, self.inputs, self.session.options.freeze)
        self._close(record, before, backup)

    def open_numbers(self) -> Numbers:
        origins = self.session.origins
        return Numbers(self.gm, self.inputs, given_tensor if origins is None else origins.tensor)

    def check_numbers(self, what: str) -> None:
        """Raise VerificationError if the graph computes something else than before; note what nobody can tell."""
        reason = self.numbers.check() if self.numbers is not None else None
        if reason is not None and reason not in self.notes:
            self.notes.add(reason)
            note = f"verify: {self.graph}, after {what}: {reason}"
            self.session.warnings.append(note)
            log.info("%s", note)

    def _put_in_order(self) -> None:
        """A user's pass may leave a value after its first use: that is mended, not held against it."""
        rewriter = Rewriter(Program(self.gm, self.inputs), StableTopologicalSort.name)
        StableTopologicalSort().run(PassRun(rewriter, self.session.options, self.is_inference))

    def _open(self, name: str) -> PassRecord:
        record = PassRecord(self.stage, name, self.graph, nodes_before=len(self.gm.graph.nodes))
        record.ordinal = self.session.count.made
        record.listing = self.listing
        if self.listing is not None:
            record.versions = (len(self.listing.deltas),) * 2
        return record

    def _close(self, record: PassRecord, before: Contract | None, backup: Graph | None) -> None:
        if record.changed and self.session.options.verify == "each":
            self._verify(record, before, backup)
        record.nodes_after = len(self.gm.graph.nodes)
        if record.changed:
            self.changed = True
            if self.listing is not None:
                record.versions = (record.versions[0], self.listing.add(lines(self.gm.graph)))
            _private.trace_artifact(f"triptych_{self.stage}_{record.name}_{self.graph}", lambda: text(self.gm))
            log.debug("%s %s: %d rewrites in %s", self.stage, record.name, record.rewrites, self.graph)
        self.session.add(record)

    def _verify(self, record: PassRecord, before: Contract | None, backup: Graph | None) -> None:
        try:
            verify(self.gm, before)
            self.check_numbers(record.name)
        except VerificationError as error:
            if backup is not None:
                self.gm.graph = backup
                self.program = Program(self.gm, self.inputs, self.session.options.freeze)
            record.error = f"undone: {error}"
            record.declines.append(Decline(record.name, "", f"verification failed: {error}"))
            record.rewrites, record.changed = 0, False
            record.fired.clear()
            _warn(self.session, f"pass {record.name} was undone: {error}")

    def _failed(self, record: PassRecord, what: str, error: Exception) -> None:
        record.error = traceback.format_exc()
        _warn(self.session, f"{what} raised {type(error).__name__}: {error}; the compile goes on without it")


def _wants_module(custom: Callable[..., Any]) -> bool:
    """A pass whose first parameter is called `gm` or is annotated as a GraphModule gets the module."""
    params = list(inspect.signature(custom).parameters.values())
    if not params:
        return False
    first = params[0]
    return first.name in ("gm", "module", "graph_module") or "GraphModule" in str(first.annotation)


def _warn(session: Session, message: str) -> None:
    session.warnings.append(message)
    log.warning("%s", message)
