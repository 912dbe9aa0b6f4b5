"""`fix_iota_device`: builds an iota on the device where it is used, instead of on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..ir.devices import computes_alike, unlike_elsewhere
from ..ir.effects import node_operands
from ..ir.facts import tensor_fact, tensor_of
from ..ir.program import Program, Value
from ..match.pattern import Tensor
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Rule
from ..rules.other_device import again_elsewhere, end_elsewhere

IOTA = ("arange", "prims.iota")
NUMBERS = ("full", "scalar_tensor")

META: dict[str, Any] = {"same_values": False, "dialects": ("aten",)}

LONGEST = 32
"""Search budget: how many operations between an iota and its use are examined."""


class FixIotaDevice(Rule):
    """to(f(iota(n)), device), x[f(iota(n))] -> the same with iota built on the device of the result, for f exact there

    f consists of comparisons, arithmetic and views. This saves a copy from the host and the wait for it, and does not
    split a CUDA graph.
    """

    interior_may_be_used = True
    mixed_dtypes = True

    def pattern(self, op, x: Tensor, values, indices, new, accumulate, dtype, device, later, copy):
        return op.any_of(
            op.to(x, dtype=dtype, device=device, non_blocking=later, copy=copy),
            op.index(values, indices), op.index_put(values, indices, new, accumulate),
            op.tensor_getitem(values, indices),
        )  # fmt: skip

    def check(self, m, x, indices, values):
        m.applies(m.root.known and m.root.is_tensor and m.root.device.type != "cpu")
        sources = [x.node] if isinstance(x, Value) else [n for n in _nodes(indices) if n is not values.node]
        on_cpu = [n for n in sources if (t := tensor_fact(n)) is not None and t.device.type == "cpu"]
        m.applies(on_cpu)
        chains = [chain for n in on_cpu if (chain := counted_from_iota(m.program, n)) is not None]
        m.applies(chains, "it is not computed from an iota")
        counted = sorted({n for chain in chains for n in chain})
        for node in counted:
            problem = unlike_elsewhere(m.program.call(node), tensor_of(node))
            m.require(problem is None, str(problem), at=node)
        m.cover(counted)

    def rewrite(self, op, m):
        twins: dict[Node, Any] = {}
        for node in sorted(n for n in m.nodes if n is not m.root.node):
            moved = any(n in twins for n in node.all_input_nodes)
            twins[node] = again_elsewhere(op, node, twins, {} if moved else {"device": m.root.device})
        return end_elsewhere(m.root.node, twins, op)

    examples = [
        fires(lambda x: x + torch.arange(8).to("meta"), torch.empty(4, 8, device="meta"), **META),
        fires(lambda x: x + (torch.arange(8) * 2 < 3).to("meta", x.dtype), torch.empty(4, 8, device="meta"), **META),
        fires(lambda x: x[torch.arange(2)] + x[:, torch.arange(3) + 1, None][:2, :1], torch.empty(4, 8, device="meta"),
              **META),
        fires(lambda x: x.index_put((torch.arange(2),), x[:2] * 2), torch.empty(4, 8, device="meta"), **META),
        fires(lambda x: (i := torch.arange(8), x + i.to("meta")), torch.empty(4, 8, device="meta"), **META),
        declines(lambda x: x + torch.arange(0, 1, 0.125).to("meta"), torch.empty(4, 8, device="meta"), because="steps",
                 **META),
        declines(lambda x: x + torch.arange(8).sqrt().to("meta"), torch.empty(4, 8, device="meta"), **META),
        declines(lambda x, i: x[i], torch.empty(4, 8, device="meta"), "i64[2]", **META),
        declines(lambda x: x[torch.arange(2)] + torch.arange(8).to(x.dtype), "f32[4, 8]"),
    ]  # fmt: skip


def _nodes(indices: Any) -> list[Node]:
    return list(node_operands([i.node if isinstance(i, Value) else i for i in _flat(indices)]))


def _flat(indices: Any) -> list[Any]:
    return list(indices) if isinstance(indices, (list, tuple)) else [indices]


def counted_from_iota(program: Program, node: Node) -> list[Node] | None:
    """The nodes from which a value on the CPU is computed, if they start from iotas and constants only, with at least
    one iota, and give the same bits on every device; else None."""
    nodes: dict[Node, None] = {}
    work, counted = [node], False
    while work:
        current = work.pop()
        if current in nodes:
            continue
        value, call = tensor_fact(current), program.call(current)
        if value is None or call is None or call.mutates or value.device.type != "cpu" or len(nodes) == LONGEST:
            return None
        if program.aliasing.written(current):
            return None
        operands = [n for n in current.all_input_nodes if tensor_fact(n) is not None]
        if call.op in (*IOTA, *NUMBERS):
            counted |= call.op in IOTA
            if operands:
                return None
        elif not operands or not computes_alike(program, current, call, value):
            return None
        nodes[current] = None
        work.extend(operands)
    return list(nodes) if counted else None
