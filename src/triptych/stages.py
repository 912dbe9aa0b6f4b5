"""The three stages as plain functions, for anybody who has a graph: drop-in for Inductor's functions of these names.

They take a graph as it comes, from Dynamo, `torch.export`, `make_fx` or `symbolic_trace`, torch-level or ATen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from .arguments import require_graph, require_sequence
from .fallback import Way, first_that_compiles
from .ir.graph_copies import Backup
from .options import Options, name_list
from .passes.manager import run_stage
from .passes.session import Session, call_site, open_session


def pre_grad_passes(
    gm: GraphModule,
    example_inputs: Sequence[Any] = (),
    add_passes: str | Sequence[str] | None = None,
    remove_passes: str | Sequence[str] | None = None,
) -> GraphModule:
    """Stage 1, on a torch-level graph. Passes are added and removed by exact name."""
    require_graph(gm, "pre_grad_passes")
    require_sequence(example_inputs, "pre_grad_passes")
    options = Options.make({"add_passes": name_list(add_passes), "remove_passes": name_list(remove_passes)})
    return _run_alone("pre_grad", gm, options, graph="pre_grad", example_inputs=example_inputs)


def joint_graph_passes(gm: GraphModule) -> GraphModule:
    """Stage 2, on the forward and backward in one graph, or on an inference graph."""
    require_graph(gm, "joint_graph_passes")
    return _run_alone("joint", gm, Options(), graph="joint")


def post_grad_passes(
    gm: GraphModule,
    is_inference: bool,
    add_passes: str | Sequence[str] | None = None,
    remove_passes: str | Sequence[str] | None = None,
) -> None:
    """Stage 3, on a forward or a backward graph, in place. Passes are added and removed by exact name."""
    require_graph(gm, "post_grad_passes")
    options = Options.make({"add_passes": name_list(add_passes), "remove_passes": name_list(remove_passes)})
    _run_alone("post_grad", gm, options, graph="forward", is_inference=is_inference)


def _run_alone(stage: str, gm: GraphModule, options: Options, **facts: Any) -> GraphModule:
    """Run one stage; if that fails, leave the graph as it came, with a warning."""
    session = open_session(options, call_site())
    result = _run(stage, gm, session, **facts)
    session.keep(facts["graph"], result)
    session.graph_compiled()
    return result


def _run(stage: str, gm: GraphModule, session: Session, **facts: Any) -> GraphModule:
    if session.options.on_error == "raise":
        return run_stage(stage, gm, session, **facts)
    backup = Backup(gm)

    def as_it_came() -> GraphModule:
        backup.restore()
        return gm

    ways = [
        Way("was optimised", lambda: run_stage(stage, gm, session, **facts)),
        Way("stays as it came", as_it_came),
    ]
    return first_that_compiles(ways, session, lambda error: "The caller has the graph")
