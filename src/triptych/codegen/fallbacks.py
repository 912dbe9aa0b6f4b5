"""Writes in place that Inductor has no kernel for, such as `addmm_`: it calls ATen's, on operands laid out as in eager.

Inductor does so of itself for any operator that it does not know, but less well: in a backward graph it first copies
every operand that is not contiguous, such as the transposed one of a product. And where the environment sets `CI`, it
raises, because it wants its developers to decompose the operator, which here would undo the write in place.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from .. import _private


def call_unknown_writes(gm: GraphModule) -> None:
    """Tell Inductor to call ATen for the writes in place of a graph, and of graphs inside it, that it does not know."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, _private.OpOverload) and _is_unknown_write(node.target):
                    _private.make_fallback(
                        node.target,
                        layout_constraint=_private.constrain_to_fx_strides,
                        warn=False,
                        override_decomp=True,
                    )


def _is_unknown_write(overload: Any) -> bool:
    return overload.namespace == "aten" and overload._schema.is_mutable and overload not in _private.lowerings
