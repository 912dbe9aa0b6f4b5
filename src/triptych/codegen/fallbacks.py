"""Operators in a finished graph that Inductor lowers in another way for our programs.

For those that it has no kernel for it calls ATen's, on operands laid out as in eager.

These are writes in place, such as `addmm_`, and operators that AOTAutograd has decomposed wherever they were captured,
but that one of our passes has put into the graph since, such as `flip`.

By default, Inductor also calls ATen for any operator that it does not know, but in a backward graph it first copies
every operand that is not contiguous, such as the transposed one of a product. And it raises where it knows a
decomposition, which would come too late here, or would undo an in-place write.

Where sizes are symbolic, a custom operator that writes a view is given the offset of the view by a node that asks the
view for it. Inductor calls ATen for that node, on an example of the view whose offset is always 0: the operator would
write elsewhere. The traced value of the node has the offset.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import GraphModule

from .. import _private
from ..kernels.onednn import linear_operator
from .narrow_indices import only_what_fits


def call_what_has_no_kernel(gm: GraphModule) -> None:
    """Tell Inductor to call ATen for the operators of a graph, and of graphs inside it, that it has no kernel for."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, _private.OpOverload) and _has_no_kernel(node.target):
                    _private.make_fallback(
                        node.target,
                        layout_constraint=_private.constrain_to_fx_strides,
                        warn=False,
                        override_decomp=True,
                    )


def _has_no_kernel(overload: Any) -> bool:
    if overload.namespace != "aten" or overload in _private.lowerings:
        return False
    return overload._schema.is_mutable or overload in _private.select_decomp_table()


_OURS = ContextVar("_OURS", default=False)
"""Is the program that is being compiled one of ours? Others keep the lowering that they have without us."""


@contextlib.contextmanager
def own_lowerings() -> Iterator[None]:
    """Within it, Inductor calls oneDNN's linear layer with any weight, of which its own lowering takes only those that
    it has packed; the offset of a view is the traced one; and integers computed from indices are those of their dtype.
    """
    _install()
    token = _OURS.set(True)
    try:
        yield
    finally:
        _OURS.reset(token)


@functools.cache
def _install() -> None:
    operator, lowerings = linear_operator(), _private.lowerings
    usual = lowerings.get(operator)
    if usual is not None:
        lowerings[operator] = _unless_ours(usual, _private.fallback_handler(operator, add_to_fallback_set=False))
    usual = lowerings.get(OFFSET, _private.fallback_handler(OFFSET, add_to_fallback_set=False))
    lowerings[OFFSET] = _unless_ours(usual, _traced_offset)
    indices = _private.IndexPropagation
    propagate = indices.propagate_sympy
    indices.propagate_sympy = _unless_ours(propagate, functools.partial(only_what_fits, propagate))


OFFSET = torch.ops.aten.sym_storage_offset.default


def _traced_offset(view: Any) -> Any:
    offset = _private.virtualized.graph.current_node.meta["val"]
    return offset.node.expr if isinstance(offset, torch.SymInt) else offset


def _unless_ours(usual: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if _OURS.get() else usual(*args, **kwargs)

    return lowering
