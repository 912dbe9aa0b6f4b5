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
"""How the names of the operators begin that compute an attention whole."""

BY_PRODUCTS = "aten::_scaled_dot_product_attention_math"
"""The same beginning, and yet several products."""


def kernel(op: Emitter, q: Value, k: Value, v: Value, attn_mask: Value | None, **how: Any) -> Value:
    """The operators that `scaled_dot_product_attention` consists of for these operands, written into the graph.

    The operator itself has no place there. Later passes would take its graph for one that is still to be decomposed,
    and a code generator would call it as it is: the choice of the kernel, which the strides of its result depend on,
    would be left to the settings at run time.
    """
    operands = [value.node for value in (q, k, v, attn_mask) if value is not None]

    def attention(*operands: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*operands, **how)  # type: ignore[arg-type]

    traced = in_aten(op, attention, operands)
    if not any(map(_is_kernel, traced.graph.nodes)):
        raise Refused("torch has no kernel for this attention, and would compute it by products and a softmax")
    return Value(op.program, put(op, traced, operands))


def _is_kernel(node: Node) -> bool:
    name = node.target.name() if isinstance(node.target, _private.OpOverload) else ""
    return name.startswith(KERNELS) and not name.startswith(BY_PRODUCTS)
