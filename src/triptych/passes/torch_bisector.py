"""PyTorch's CompilerBisector, which finds the pass at fault by leaving out more and more of them."""

from __future__ import annotations

import sys

from .. import _private

SUBSYSTEMS = {
    "pre_grad": "pre_grad_passes",
    "freeze": "joint_graph_passes",
    "joint": "joint_graph_passes",
    "before_partition": "joint_graph_passes",
    "after_partition": "post_grad_passes",
    "post_grad": "post_grad_passes",
    "before_codegen": "post_grad_passes",
}
"""The stages as the bisector calls them; it knows three."""


def disabled_by_bisector(stage: str, pass_name: str) -> bool:
    """Does the bisector, if it is running, want this pass left out? The bisector counts each call of this."""
    if not _is_imported():
        return False
    name = f"triptych {stage} {pass_name}"
    return _private.CompilerBisector.disable_subsystem("inductor", SUBSYSTEMS[stage], lambda: name)


def bisector_runs() -> bool:
    """Is the bisector running? It counts passes, so each of them must run."""
    return _is_imported() and _private.CompilerBisector.get_backend() is not None


def _is_imported() -> bool:
    """torch.compile imports the bisector; before that, it cannot have been started."""
    return "torch._inductor.compiler_bisector" in sys.modules
