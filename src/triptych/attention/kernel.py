"""Which kernel computes an attention, in an ATen graph after autograd: the one that torch would have chosen there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import _private
from ..ir.program import Value
from ..rewrite.emit import Emitter
from ..rewrite.functions import in_aten, put
from ..rewrite.refusal import Refused

KERNELS = "aten::_scaled_dot_product_"
"""Name prefix of the operators that compute a whole attention in one kernel."""

BY_PRODUCTS = "aten::_scaled_dot_product_attention_math"
"""An operator with the same prefix that computes an attention by several products."""

NO_KERNEL = "torch has no kernel for this attention, and would compute it by products and a softmax"


def kernel(op: Emitter, q: Value, k: Value, v: Value, attn_mask: Value | None, **how: Any) -> Value:
    """Inserts the operators into which `scaled_dot_product_attention` decomposes for these operands.

    The operator itself must not be in the graph. Later passes would assume that the graph is still to be decomposed,
    and a code generator would call the operator as it is: the choice of the kernel, on which the strides of the result
    depend, would be left to the settings at run time.
    """
    operands = [value.node for value in (q, k, v, attn_mask) if value is not None]

    def attention(*operands: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*operands, **how)  # type: ignore[arg-type]

    traced = in_aten(op, attention, operands)
    if not any(map(_is_kernel, traced.graph.nodes)):
        raise Refused(NO_KERNEL)
    return Value(op.program, put(op, traced, operands))


def _is_kernel(node: Node) -> bool:
    name = node.target.name() if isinstance(node.target, _private.OpOverload) else ""
    return name.startswith(KERNELS) and not name.startswith(BY_PRODUCTS)
