"""Which operations give bit-identical results on CPU and GPU, and which GPU operations accept a CPU operand."""

from __future__ import annotations

import torch
from torch.fx import Node

from .calls import Call
from .facts import number, tensor_fact
from .operations import with_trait
from .program import Program
from .refusal import Refusal
from .traits import is_pointwise
from .values.shape_only import EXACT, SAME_ELEMENTS

ROUNDED_ON_GPU = with_trait("rounds_on_gpu")

INDEXING = frozenset("index _unsafe_index index_put _unsafe_index_put tensor_getitem".split())
"""Operations that accept an index on the CPU, whatever the device of the values."""


def not_taken_over(call: Call, user: Node, operand: Node) -> Refusal | None:
    """Why a GPU operation with a CPU operand cannot take that operand from the GPU instead; None if it can."""
    if call.op == "to" or (call.op in INDEXING and call.args.get("self") is not operand):
        return None
    value = tensor_fact(operand)
    if value is None or value.dim() or not is_pointwise(call.op):
        return Refusal("{at} reads it from the CPU", at=user)
    operands = [
        v for n in user.all_input_nodes if (v := tensor_fact(n)) is not None and v.dtype != torch.bool
    ]
    if any(v.dtype != value.dtype for v in operands):
        # a number from the CPU keeps its precision, one from the GPU is first rounded to the result's dtype
        return Refusal("{at} would round it before it computes", at=user)
    return None


def computes_alike(program: Program, node: Node, call: Call, result: torch.Tensor) -> bool:
    """Does the operation give bit-identical results on CPU and GPU?"""
    if not program.aliasing.effects(node).pure or "device" in call.args:
        return False
    if result.dtype.is_floating_point and call.op in ROUNDED_ON_GPU:
        return False
    return call.op in SAME_ELEMENTS or call.op in EXACT or call.op == "to"


def unlike_elsewhere(call: Call, result: torch.Tensor) -> str | None:
    """Why a constructor gives something else on a GPU; None if it gives the same."""
    if call.args.get("pin_memory"):
        return "it is in pinned memory"
    if call.op == "arange" and result.dtype.is_floating_point:
        # the CPU accumulates steps in double, the GPU in float: equal as long as all of them are whole numbers
        bounds = [number(call.args.get(name, 0)) for name in ("start", "end", "step")]
        if not all(isinstance(b, (int, float)) and float(b).is_integer() and abs(b) < 2**24 for b in bounds):
            return "its steps are rounded differently on a GPU"
        if result.dtype != torch.float32 and result.dtype != torch.float64:
            return "its steps are rounded differently on a GPU"
    return None
