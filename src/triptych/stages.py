"""The three stages as plain functions, for anybody who has a graph: drop-in for Inductor's functions of these names.

They take a graph as it comes, from Dynamo, `torch.export`, `make_fx` or `symbolic_trace`, torch-level or ATen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from .options import Options, name_list
from .passes.manager import run_stage
from .passes.session import open_session


def pre_grad_passes(
    gm: GraphModule,
    example_inputs: Sequence[Any] = (),
    add_passes: str | Sequence[str] | None = None,
    remove_passes: str | Sequence[str] | None = None,
) -> GraphModule:
    """Stage 1, on a torch-level graph. Passes are added and removed by exact name."""
    options = Options.make({"add_passes": name_list(add_passes), "remove_passes": name_list(remove_passes)})
    return run_stage("pre_grad", gm, open_session(options), graph="pre_grad", example_inputs=example_inputs)


def joint_graph_passes(gm: GraphModule) -> GraphModule:
    """Stage 2, on the forward and backward in one graph, or on an inference graph."""
    return run_stage("joint", gm, open_session(Options()), graph="joint")


def post_grad_passes(gm: GraphModule, is_inference: bool) -> None:
    """Stage 3, on a forward or a backward graph, in place."""
    run_stage("post_grad", gm, open_session(Options()), graph="forward", is_inference=is_inference)
