"""Triptych: an open, explainable graph-optimising compiler middle-end for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import RuleError, TriptychError, UnknownName, UnsupportedTorch, VerificationError

# at once, not later: the function must be here before anybody imports the sub-package of the same name
from .explain.explain import explain
from .explain.why_not import find, why_not
from .options import Options
from .passes.catalogue import list_passes
from .pre_grad.normalized_nodes import NormalizedLinearNode, NormalizedMatmulNode
from .rewrite.functions import rule
from .rewrite.rule import FirstOf, Match, Rule
from .stages import joint_graph_passes, post_grad_passes, pre_grad_passes

if TYPE_CHECKING:
    from .backend import compile_fx, make_backend
    from .explain.bisect import bisect

__version__ = "0.1.0"

__all__ = [
    "FirstOf", "Match", "NormalizedLinearNode", "NormalizedMatmulNode", "Options", "Rule", "RuleError", "TriptychError",
    "UnknownName", "UnsupportedTorch", "VerificationError", "bisect", "compile_fx", "explain", "find",
    "joint_graph_passes", "list_passes", "make_backend", "post_grad_passes", "pre_grad_passes", "rule", "why_not",
]  # fmt: skip

_LATER = {"bisect": ".explain.bisect", "compile_fx": ".backend", "make_backend": ".backend"}


def __getattr__(name: str) -> Any:
    """What needs the whole of torch.compile is imported when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'triptych' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name], __name__), name)
