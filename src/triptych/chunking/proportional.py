"""A proof that values are proportional to the incoming gradient.

A value that is proportional to a number t can be computed for t = 1 and multiplied by t afterwards. Each operation is
examined separately: a sum of proportional values is proportional, and so is the product of a proportional value with
one that does not depend on t.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import tensor_fact, tensor_of
from ..ir.refusal import Refusal

KEEP = frozenset(
    ("neg", "reshape", "unsqueeze", "squeeze", "alias", "detach", "permute", "expand", "clone", "contiguous", "slice",
     "sum", "mean", "to")
)  # fmt: skip
"""Operations on one tensor with f(t * x) = t * f(x)."""
TERMS = {"add": ("self", "other"), "sub": ("self", "other"), "slice_scatter": ("self", "src"),
         "scatter_add": ("self", "src"), "where": ("self", "other")}  # fmt: skip
"""Operations that add or choose among terms: each must be proportional to t, or zero."""
FACTORS = frozenset(("mul", "matmul"))


def problem(node: Node, call_of: Callable[[Node], Call | None], seeded: Collection[Node]) -> Refusal | None:
    """Why a value is not known to be proportional to t, given that its operands in `seeded` are; None if it is."""
    call = call_of(node)
    result = tensor_fact(node)
    not_known = Refusal("{at} is not known to be proportional to the gradient that comes in", at=node)
    if call is None or call.mutates or result is None or not result.dtype.is_floating_point:
        return not_known
    if result.dtype == torch.float16:
        return Refusal("{at} is a gradient in float16, which may underflow without the loss scale", at=node)
    args = call.args
    dependent = [name for name, value in args.items() if isinstance(value, Node) and value in seeded]
    if call.op in KEEP:
        return None if dependent == ["self"] else not_known
    if call.op == "div":
        return None if dependent == ["self"] and "rounding_mode" not in args else not_known
    if call.op in FACTORS:
        return None if len(dependent) == 1 else not_known
    if call.op == "prims.fma":  # a * b + c
        factors = [name for name in dependent if name != "c"]
        return None if len(factors) == 1 and "c" in dependent else not_known
    if call.op == "gather":
        return None if dependent == ["self"] else not_known
    terms = TERMS.get(call.op)
    if terms is None or not set(dependent) <= set(terms):
        return not_known
    is_proportional = all(name in dependent or is_zero(args.get(name), call_of) for name in terms)
    return None if is_proportional else not_known


def is_zero(value: Any, call_of: Callable[[Node], Call | None]) -> bool:
    """A number or a constant tensor that is zero everywhere."""
    while isinstance(value, Node):
        call = call_of(value)
        if call is None or call.mutates:
            return False
        if call.op in ("full", "full_like"):
            value = call.args["fill_value"]
        elif call.op == "scalar_tensor":
            value = call.args["s"]
        elif call.op in ("expand", "reshape", "to", "clone"):
            value = call.args["self"]
        else:
            return False
    return isinstance(value, (int, float)) and value == 0


def is_scalar(node: Node) -> bool:
    """Is the value a zero-dim tensor of a float dtype?"""
    tensor = tensor_fact(node)
    return tensor is not None and tensor.dim() == 0 and tensor_of(node).dtype.is_floating_point
