"""The step of the flow that `freeze` adds: an inference graph whose constants are computed once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from ..codegen.base import Compiled
from ..codegen.eager import boxed
from ..cost import bytes_of
from ..ir.facts import fact
from ..ir.weights import FIXED
from ..passes.manager import run_stage
from ..passes.session import Session
from ..rewrite.computed_once import COMPUTED_ONCE, ComputedOnce
from .constants import Constants

log = logging.getLogger("triptych")


@dataclass
class Frozen:
    """An inference graph without the computations that depend on its weights alone."""

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


def freeze(gm: GraphModule, inputs: Sequence[Any], session: Session, again: bool = False) -> Frozen | None:
    """Takes values that are computed from weights alone out of an inference graph, in place; None if there are none.

    `again`: the call after a later stage, for values that its passes compute from weights (padding). It is recorded
    only if there are any.
    """
    mark_weights(gm, session)
    run_stage("freeze", gm, session, graph="joint", example_inputs=inputs, is_inference=True)
    taken: ComputedOnce | None = gm.meta.pop(COMPUTED_ONCE, None)
    if taken is None:
        if again:
            session.records.pop()
        return None
    made = [fact(n) for n in taken.constants]
    note = f"{taken.operations} operations are done once, {_amount(sum(map(bytes_of, made)))} are kept"
    session.records[-1].note = note
    log.info("freeze: %s", note)
    constants = Constants(taken.module(), taken.weights, made)
    return Frozen(constants, taken.kept, [inputs[i] for i in taken.kept] + made)


def mark_weights(gm: GraphModule, session: Session) -> None:
    """Marks the inputs that are weights. These are in the same memory on every call, so that CUDA graphs need not copy
    them; and passes recognise weights by the mark."""
    assert session.origins is not None
    for node in gm.graph.find_nodes(op="placeholder"):
        if session.origins.is_weight(node):
            node.meta[FIXED] = True


def _amount(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def warn_of_training(session: Session) -> None:
    """Warns that `freeze` has no effect, because gradients are recorded."""
    message = (
        "freeze has no effect on this graph: it was captured with gradients on, for training, where weights change. "
        "Call the model under torch.no_grad() or torch.inference_mode()"
    )
    session.warnings.append(message)
    log.warning("%s", message)
