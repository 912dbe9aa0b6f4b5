"""The step of the flow that `freeze` adds: an inference graph whose constants are computed once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from ..codegen.base import Compiled
from ..codegen.eager import boxed
from ..ir.facts import fact
from ..ir.origins import Origins
from ..ir.text import lines, source_line
from ..passes.record import Listing, PassRecord
from ..passes.session import Session
from ..rewrite.record import Decline
from .constants import Constants
from .split import Split, Steady, split_constants

log = logging.getLogger("triptych")


@dataclass
class Frozen:
    """An inference graph without the work on its weights."""

    constants: Constants
    kept: list[int]
    inputs: list[Any]
    """Example inputs of the graph as it is now."""

    def call(self, compiled: Compiled) -> Compiled:
        """The compiled graph as a function of the inputs it had before."""
        constants, kept = self.constants, self.kept

        def run(inputs: list[Any]) -> Any:
            given = [inputs[i] for i in kept]
            given += constants.of(inputs)
            inputs.clear()
            return compiled(given)

        return boxed(run)


def freeze(
    gm: GraphModule, inputs: Sequence[Any], session: Session, origins: Origins, again: bool = False
) -> Frozen | None:
    """Split off what is computed from weights alone, in place; None if there is nothing such.

    `again`: after the joint stage, for what its passes make of weights (padding); told only if there is something.
    """
    record = PassRecord("joint", "freeze", "joint", nodes_before=len(gm.graph.nodes), ordinal=session.count.made)
    if session.observed:
        record.listing = session.listings.setdefault("joint/joint", Listing(lines(gm.graph)))
        record.versions = (len(record.listing.deltas),) * 2
    started = time.perf_counter()
    steady = Steady(gm, origins)
    steady.mark_fixed()
    split = split_constants(steady, session.rewrites_left)
    record.seconds = time.perf_counter() - started
    record.nodes_after = len(gm.graph.nodes)
    record.stop = "nothing to do"
    record.declines = [Decline("computed_once", n.name, why, source_line(n)) for n, why in steady.declined]
    if split is None:
        if not again:
            session.add(record)
        return None
    _tell(record, split)
    if record.listing is not None:
        record.versions = (record.versions[0], record.listing.add(lines(gm.graph)))
    session.add(record)
    constants = Constants(split.constants_graph, split.weights, [fact(n) for n in split.constants])
    given = [inputs[i] for i in split.kept] + [fact(n) for n in split.constants]
    return Frozen(constants, split.kept, given)


def _tell(record: PassRecord, split: Split) -> None:
    record.changed = True
    record.rewrites = len(split.constants)
    record.fired["computed_once"] = len(split.constants)
    record.stop = "fixpoint"
    record.note = f"{split.moved} operations are done once, {_amount(split.bytes)} are kept"
    log.info("freeze: %s", record.note)


def _amount(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def warn_of_training(session: Session) -> None:
    """Freeze was promised, and yet gradients are recorded."""
    message = (
        "freeze has no effect on this graph: it was captured with gradients on, for training, where weights change. "
        "Call the model under torch.no_grad() or torch.inference_mode()"
    )
    session.warnings.append(message)
    log.warning("%s", message)
