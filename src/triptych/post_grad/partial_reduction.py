"""`partial_reduction`: computes a reduction over some dims from the result of a reduction over fewer of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..cost import bytes_of, require_gain
from ..ir.facts import tensor_fact, tensor_of
from ..ir.program import Program
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule

ONE_DIM_OF = {"amax": "amax", "amin": "amin", "max": "amax", "min": "amin", "sum": "sum"}
"""Reductions that can be computed from partial results, with the name of the form that takes dims. `max` and `min` only
count where they reduce all dims."""
NARROW = (torch.float16, torch.bfloat16)
ATEN: dict[str, Any] = {"dialects": ("aten",)}


@dataclass(frozen=True)
class _Reduction:
    node: Node
    name: str
    dims: frozenset[int]
    keepdim: bool


class PartialReduction(Rule):
    """amax(x, d), amax(x, d and more) -> p = amax(x, d), amax(p, more); also amin and sum; up to rounding

    x is read once instead of twice. A maximum or minimum has the same bits, except that of 0.0 and -0.0 either may be
    the result. The rule declines for sums in half precision: the partial sums would be rounded before they are added.
    """

    exact = False

    def sites(self, program: Program) -> Iterator[Match]:
        reductions: dict[Any, list[_Reduction]] = {}
        for node in program.calls_of(*ONE_DIM_OF):
            reduction = _read(program, node)
            if reduction is not None:
                kind = node.all_input_nodes[0], reduction.name, tensor_of(node).dtype
                reductions.setdefault(kind, []).append(reduction)
        for (x, _, _), several in reductions.items():
            first = {r.dims: r for r in reversed(several)}
            # most dims first: every reduction that could begin with this one has been rewritten before it is replaced
            for whole in sorted(several, key=lambda r: -len(r.dims)):
                inner = [r for r in first.values() if r.dims < whole.dims and not r.node._erased]
                if inner and not whole.node._erased:
                    partial = max(inner, key=lambda r: len(r.dims))
                    is_there = partial.node < whole.node
                    roots = [whole.node] if is_there else [whole.node, partial.node]
                    yield Match.at(program, *roots, covers=[partial.node] if is_there else [], before=whole.node,
                                   x=x, whole=whole, partial=partial)  # fmt: skip

    def check(self, m):
        x, partial, whole = (m.bindings[name] for name in ("x", "partial", "whole"))
        partial_result, result = tensor_of(partial.node), tensor_of(whole.node)
        narrow = whole.name == "sum" and result.dtype in NARROW
        m.require(not narrow, "the partial sums would be rounded to {found} before they are added", found=result.dtype)
        whole_read, partial_read = (bytes_of(source) + bytes_of(result) for source in (tensor_of(x), partial_result))
        require_gain(m, result.device, lambda model: (model.copy(whole_read), model.copy(partial_read)))

    def rewrite(self, op, m):
        partial, whole = m.bindings["partial"], m.bindings["whole"]
        partial_value = m.program.value(partial.node) if len(m.roots) == 1 else op.again(partial.node, {})
        reduced_dims = [] if partial.keepdim else sorted(partial.dims)
        more = [d - sum(g < d for g in reduced_dims) for d in sorted(whole.dims - partial.dims)]
        rest = more if not partial.keepdim or whole.keepdim else sorted(whole.dims)
        how = {"keepdim": True} if whole.keepdim and partial.keepdim else {}
        result = getattr(op, whole.name)(partial_value, rest, **how)
        if whole.keepdim and not partial.keepdim:
            result = op.reshape(result, list(m.root.shape))
        return result if len(m.roots) == 1 else (result, partial_value)

    examples = [
        fires(lambda x: (x.amax(1), x.amax()), "f32[64, 512]", **ATEN),
        fires(lambda x: (x.amax(), x.amax(-1, keepdim=True)), "bf16[64, 512]", **ATEN),
        fires(lambda x: (x.amin([1], keepdim=True), x.amin([0, 1], keepdim=True)), "f32[64, 512]", **ATEN),
        fires(lambda x: (x.max(), x.amax(1)), "i64[64, 512]", **ATEN),
        fires(lambda x: (x.sum(2), x.sum([1, 2]), x.sum([0, 1, 2], keepdim=True)), "f32[8, 32, 256]", **ATEN),
        fires(lambda x: (x.sum(), x.sum([1, 2]), x.sum(2)), "f32[8, 32, 256]", **ATEN),
        fires(lambda x: (x.sum(1), x.sum(dtype=torch.int64)), "i32[64, 512]", **ATEN),
        fires(lambda x: (x.amax(1), x.amax()), torch.full((64, 512), torch.nan), **ATEN),
        fires(lambda x: (x.amax(1), x.amax()), "f32[64, 512]", dynamic=True, **ATEN),
        declines(lambda x: (x.amax(1), x.amax()), "f32[4, 8]", because="would cost", **ATEN),
        declines(lambda x: (x.amax(1), x.amax(0)), "f32[64, 512]", **ATEN),
        declines(lambda x: (x.amax(1), x.amin()), "f32[64, 512]", **ATEN),
        declines(lambda x: (x.sum(1), x.sum()), "bf16[64, 512]", because="rounded", **ATEN),
        declines(lambda x: (x.sum(1), x.sum(dtype=torch.float64)), "f32[64, 512]", **ATEN),
        declines(lambda x: (x.mean(1), x.mean()), "f32[64, 512]", **ATEN),
    ]  # fmt: skip


def _read(program: Program, node: Node) -> _Reduction | None:
    call = program.call(node)
    if call is None or call.mutates or call.op not in ONE_DIM_OF or tensor_fact(node) is None:
        return None
    x = tensor_fact(call.args.get("self"))
    if x is None or (call.op in ("max", "min") and call.args.keys() != {"self"}):
        return None
    dim = call.args.get("dim")
    dims = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return _Reduction(node, ONE_DIM_OF[call.op], frozenset(dims), bool(call.args.get("keepdim")))
