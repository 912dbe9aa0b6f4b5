"""Triptych: an open, explainable graph-optimising compiler middle-end for PyTorch."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from . import kernels  # noqa: F401  makes torch.ops.triptych known: a saved program may call it
from ._private import plain_torch
from .releases import check_release

if TYPE_CHECKING:
    from .backend import compile_fx, make_backend
    from .errors import RuleError, TriptychError, UnknownName, UnsupportedTorch, VerificationError
    from .explaining.bisect import bisect
    from .explaining.explain import explain
    from .explaining.record import record
    from .explaining.why_not import find, why_not
    from .exported_programs import optimize
    from .ir.operation_names import list_operations
    from .options import Options
    from .passes.catalogue import list_passes
    from .pre_grad.normalized_nodes import NormalizedLinearNode, NormalizedMatmulNode
    from .rewrite.functions import rule
    from .rewrite.rule import FirstOf, Match, Rule
    from .stages import joint_graph_passes, post_grad_passes, pre_grad_passes

__version__ = "0.1.0"

check_release()

__all__ = [
    "FirstOf", "Match", "NormalizedLinearNode", "NormalizedMatmulNode", "Options", "Rule", "RuleError", "TriptychError",
    "UnknownName", "UnsupportedTorch", "VerificationError", "bisect", "compile_fx", "explain", "find",
    "joint_graph_passes", "list_operations", "list_passes", "make_backend", "optimize", "post_grad_passes",
    "pre_grad_passes", "record", "rule", "why_not",
]  # fmt: skip

_HOMES = {
    ".backend": ("compile_fx", "make_backend"),
    ".errors": ("RuleError", "TriptychError", "UnknownName", "UnsupportedTorch", "VerificationError"),
    ".explaining.bisect": ("bisect",),
    ".explaining.explain": ("explain",),
    ".explaining.record": ("record",),
    ".explaining.why_not": ("find", "why_not"),
    ".exported_programs": ("optimize",),
    ".ir.operation_names": ("list_operations",),
    ".passes.catalogue": ("list_passes",),
    ".pipeline": ("Options",),  # not .options: the pipeline tells the options which names there are
    ".pre_grad.normalized_nodes": ("NormalizedLinearNode", "NormalizedMatmulNode"),
    ".rewrite.functions": ("rule",),
    ".rewrite.rule": ("FirstOf", "Match", "Rule"),
    ".stages": ("joint_graph_passes", "post_grad_passes", "pre_grad_passes"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A name is imported from its home when it is first asked for: `import triptych` alone costs next to nothing."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'triptych' has no attribute {name!r}")
    home = sys.modules.get(f"{__name__}{_HOME_OF[name]}")
    if home is None:
        with plain_torch():  # modules make tensors, for examples among others
            home = importlib.import_module(_HOME_OF[name], __name__)
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if report_directory := os.environ.get("TRIPTYCH_REPORT"):
    importlib.import_module(".explaining.report_at_exit", __name__).start(report_directory)
