"""Gradients that are sums over rows, as a backward graph has them: those of biases and of the weights of norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import Node

from ..cost import bytes_of
from ..ir.calls import Call
from ..ir.facts import is_contiguous, is_static, tensor_fact, tensor_of
from ..ir.partitioned import returns_gradients
from ..ir.program import Program
from ..ir.traits import is_gemm, is_view
from .neighbours import readers

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_ELEMENTS = 1 << 25
"""Larger operands do not fit into a GPU's L2 cache. Inductor fuses their sums with reductions along the other dim that
read the same operand (mix-order reduction), and the time of the second kernel is negligible."""


@dataclass(frozen=True)
class GradientSum:
    """sum(x, all dims but the last), cast or reshaped, and returned, whole or in parts."""

    x: Node
    chain: tuple[Node, ...]
    """The sum, and the casts and reshapes of it."""
    views: tuple[Node, ...]
    """Views of the last one, and of each other."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes that the sum, added up in float32, is rounded to, in this order."""

    @property
    def node(self) -> Node:
        """The sum itself."""
        return self.chain[0]

    @property
    def result(self) -> Node:
        return self.chain[-1]

    @property
    def returned(self) -> list[Node]:
        return [node for node in (self.result, *self.views) if node.graph.output_node() in node.users]

    @property
    def rows(self) -> int:
        return math.prod(tensor_of(self.x).shape[:-1])

    @property
    def columns(self) -> int:
        return tensor_of(self.x).shape[-1]

    @property
    def bytes(self) -> int:
        """What the sum reads."""
        return bytes_of(tensor_of(self.x))

    @property
    def rounding(self) -> tuple[torch.dtype, torch.dtype | None]:
        """The dtype of the gradient, and the dtype that the sum is rounded to before that."""
        *through, dtype = self.dtypes or (torch.float32,)
        return dtype, through[0] if through else None


def gradient_sums(program: Program, device: str) -> Iterator[GradientSum]:
    """The sums of a backward graph on this kind of device, in the order of the graph."""
    if not returns_gradients(program.graph) or program.options.codegen != "inductor":
        return
    for node in program.graph.nodes:
        if (one := _read(program, node, device)) is not None:
            yield one


def _read(program: Program, node: Node, device: str) -> GradientSum | None:
    call = program.call(node)
    if call is None or call.op != "sum" or call.mutates:
        return None
    x, total = tensor_fact(call.args["self"]), tensor_fact(node)
    if x is None or total is None or x.device.type != device or not _adds_rows(call, x):
        return None
    if x.dtype not in DTYPES or total.dtype not in DTYPES or not is_static(x.shape) or not is_contiguous(x):
        return None
    if x.numel() > MOST_ELEMENTS:
        return None
    chain = _casts_and_reshapes(program, node)
    views = _views_that_are_returned(program, chain[-1])
    if views is None:
        return None
    dtypes = [tensor_of(n).dtype for n in chain]
    changes = tuple(now for was, now in zip([torch.float32, *dtypes], dtypes) if was != now)
    return GradientSum(call.args["self"], chain, views, changes) if len(changes) <= 2 else None


def _adds_rows(call: Call, x: torch.Tensor) -> bool:
    """Does a sum go over all dims but the last?"""
    dim = call.args.get("dim")
    dims = [dim] if isinstance(dim, int) else dim or []
    return x.dim() > 1 and {d % x.dim() for d in dims} == set(range(x.dim() - 1))


def _casts_and_reshapes(program: Program, node: Node) -> tuple[Node, ...]:
    """The node, and the casts and reshapes that follow it, each the only user of the one before."""
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


def _views_that_are_returned(program: Program, node: Node) -> tuple[Node, ...] | None:
    """The views of a value and the views of these, in order; None if it is used for anything but to return it."""
    values = [node]
    for value in values:
        if not value.users:
            return None
        for user in value.users:
            if user.op == "output":
                continue
            call = program.call(user)
            if user.target is not getitem and (call is None or not is_view(call.op)):
                return None
            values.append(user)
    return tuple(values[1:])


def is_in_memory(program: Program, x: Node) -> bool:
    """Is a value written to memory whoever else reads it? True of inputs, and of what matrix products read or return:
    Inductor calls a library for those, and fuses nothing into them."""
    base = x
    while (call := program.call(base)) is not None and is_view(call.op) and isinstance(call.args.get("self"), Node):
        base = call.args["self"]
    call = program.call(base)
    if base.op == "placeholder" or (call is not None and is_gemm(call.op)):
        return True
    calls = (program.call(reader) for reader in readers(program, base))
    return any(call is not None and is_gemm(call.op) for call in calls)
