"""Sums over the rows of a matrix, as the gradients of biases and of the weights of norms are, and how they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.calls import Call
from ..ir.facts import tensor_fact, tensor_of
from ..ir.program import Program

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Rounding = tuple[torch.dtype, "torch.dtype | None"]
"""The dtype of a result, and the dtype to which the sum, added up in float32, is rounded before that, if any."""


@dataclass(frozen=True)
class SumOverRows:
    """sum(x, all dims but the last), cast or reshaped."""

    x: Node
    chain: tuple[Node, ...]
    """The sum, followed by the casts and reshapes of it."""
    rounding: Rounding

    @property
    def result(self) -> Node:
        return self.chain[-1]

    @property
    def columns(self) -> int:
        return tensor_of(self.x).shape[-1]


def sum_over_rows(program: Program, node: Node) -> SumOverRows | None:
    """The sum over rows that this node computes, with all casts and reshapes of it that nothing else reads; None if the
    node is no such sum, or one that `triptych::sum_parts` would round otherwise."""
    call = program.call(node)
    if call is None or call.op != "sum" or call.mutates:
        return None
    x, total = tensor_fact(call.args["self"]), tensor_fact(node)
    if x is None or total is None or x.dtype not in DTYPES or total.dtype not in DTYPES or not _adds_rows(call, x):
        return None
    chain = _casts_and_reshapes(program, node)
    rounding = _rounding([tensor_of(n).dtype for n in chain])
    return None if rounding is None else SumOverRows(call.args["self"], chain, rounding)


def _adds_rows(call: Call, x: torch.Tensor) -> bool:
    """Does a sum go over all dims but the last?"""
    dim = call.args.get("dim")
    dims = [dim] if isinstance(dim, int) else dim or []
    return x.dim() > 1 and {d % x.dim() for d in dims} == set(range(x.dim() - 1))


def _casts_and_reshapes(program: Program, node: Node) -> tuple[Node, ...]:
    """The node, followed by the casts and reshapes of it, as long as each value in the chain has no other user."""
    chain = [node]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        call, value = program.call(user), tensor_fact(user)
        if call is None or call.op not in ("reshape", "to") or value is None or value.dtype not in DTYPES:
            break
        if value.device != tensor_of(node).device:
            break
        chain.append(user)
    return tuple(chain)


def _rounding(dtypes: list[torch.dtype]) -> Rounding | None:
    """How a sum of float32 numbers that has these dtypes, one after the other, is rounded; None for three changes."""
    changes = [now for was, now in zip([torch.float32, *dtypes], dtypes) if was != now]
    if len(changes) > 2:
        return None
    *through, dtype = changes or [torch.float32]
    return dtype, through[0] if through else None
