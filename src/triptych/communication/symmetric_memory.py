"""Symmetric memory: operators that compute while they communicate, and which process groups can use them."""

from __future__ import annotations

from typing import Any

import torch

from .. import _private
from ..ir.collectives import Collective
from ..ir.facts import tensor_fact
from ..ir.refusal import Refusal

LAST_DIM = 1024
"""Along the last dim, an operator computes one narrow product per rank: it pays from this many columns or rows on."""


def fused_operator(name: str) -> Any:
    """The overload of `torch.ops.symm_mem.<name>`; it exists once `problem_of_group` has been called."""
    return getattr(torch.ops.symm_mem, name).default


def problem_of_group(collective: Collective, operator_name: str) -> Refusal | None:
    """Why an operator of symmetric memory cannot replace a collective, whatever is computed with it."""
    if not _private.is_symm_mem_enabled_for_group(collective.group):
        return Refusal("symmetric memory is not enabled for the process group {found}", found=collective.group)
    operand = tensor_fact(collective.operands[0])
    if operand is None or not _private.has_kernel(fused_operator(operator_name), operand.device):
        device = None if operand is None else operand.device
        return Refusal(f"symm_mem.{operator_name} has no kernel for the device {{found}}", found=device)
    return None
