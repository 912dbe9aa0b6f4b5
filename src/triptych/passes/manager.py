"""How a stage runs: every pass timed, counted, recorded and checked from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from .session import Session


def run_stage(
    stage: str,
    gm: GraphModule,
    session: Session,
    *,
    graph: str,
    example_inputs: Sequence[Any] = (),
    is_inference: bool = False,
) -> GraphModule:
    return gm
