"""Numbers that leave the other operand unchanged, as in `x + 0` and `x * 1`.

The numbers are in the table of operations. This module says for which dtypes they really change nothing under IEEE
rules, which include infinities, NaN and the sign of zero.
"""

from __future__ import annotations

import math

import torch

from ..ir.calls import Call
from ..ir.operations import operation

Number = bool | int | float


def rounds(call: Call, dtype: torch.dtype) -> bool:
    """Is it a division of floats that rounds to whole numbers?"""
    return dtype.is_floating_point and (call.op in ("floor_divide", "remainder") or "rounding_mode" in call.args)


def is_neutral(call: Call, number: Number, dtype: torch.dtype) -> bool:
    """Is `number` the neutral number of the operation, for results of that dtype? `neutral_problem` says which
    elements it changes all the same."""
    neutral = operation(call.op).neutral
    if neutral is None or "alpha" in call.args or rounds(call, dtype):
        return False
    return number == (bool(neutral) if dtype == torch.bool else neutral)


def neutral_problem(op: str, number: Number, dtype: torch.dtype) -> str:
    """Why the neutral number changes some elements of that dtype; empty if it changes none."""
    if dtype.is_complex:  # the imaginary part of the number is a positive zero
        return "-0.0i + 0i is 0i" if op in ("add", "sub") else "an infinite part times, or divided by, 1 + 0i is NaN"
    if dtype.is_floating_point and op in ("add", "sub"):
        is_negative = math.copysign(1, number) < 0
        if op == "add" and not is_negative:
            return "the value may contain -0.0, and -0.0 + 0.0 is 0.0"
        if op == "sub" and is_negative:
            return "the value may contain -0.0, and -0.0 - -0.0 is 0.0"
    return ""
