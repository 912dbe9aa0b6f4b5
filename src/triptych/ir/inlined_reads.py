"""What Inductor reads inside the kernel of a write: it computes pointwise operations where their results are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Node

from .. import _private
from .calls import Call
from .effects import node_operands
from .facts import fact, tensor_fact
from .memory_places import Place, lies_at
from .program import Program
from .traits import is_gemm, is_pointwise, is_reduction

aten = torch.ops.aten

MOST_INLINED = 500
"""Search budget: how many values to examine that Inductor may compute inside the kernel of a write."""


def inlined_reads(
    program: Program, operands: Collection[Node], written: Place | None
) -> Iterator[tuple[Node | None, Node]]:
    """Pairs of a value that Inductor may read inside the writing kernel, and the operand that it computes there from
    it. A value of None stands for any value: there were too many to examine.

    Reads of exactly the elements that are written, each before its own write, are left out: pointwise operations on
    `written` itself.
    """
    work = [(operand, operand, written is not None) for operand in operands]
    seen = {(node, in_order) for node, _, in_order in work}  # a value may be read in order, and in another order too
    while work:
        node, operand, in_order = work.pop()
        if in_order and written is not None and lies_at(program, node, written):
            continue
        yield node, operand
        if len(seen) > MOST_INLINED + len(operands):
            yield None, operand
            return
        for further in filter(_has_elements, _operands_read_where(program, node)):
            visit = further, in_order and _is_read_in_order(program, node, further)
            if visit not in seen:
                seen.add(visit)
                work.append((further, operand, visit[1]))


def _is_read_in_order(program: Program, node: Node, operand: Node) -> bool:
    """Does each element of a result depend on no element of the operand but the one at its own place? Also true of the
    tensor that a slice is assigned to, as long as it is not the assigned value too."""
    if node.target in VIEW_OF_SCATTER:
        return operand is node.args[0] and operand is not node.args[1]
    call = program.call(node)
    return call is not None and is_pointwise(call.op)


VIEW_OF_SCATTER = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""For each scatter into a view, the operator that takes this view of the first operand, with the same arguments.
Inductor computes these scatters pointwise."""

SCATTERS = ("index_put", "_unsafe_index_put", "scatter", "scatter_add", "scatter_reduce")


def _operands_read_where(program: Program, node: Node) -> Iterator[Node]:
    """The operands that Inductor may read in the kernel that reads the result: none if it writes the result to memory
    first, and otherwise those that it computes the result from."""
    call = program.call(node)
    if _is_materialised(program, node, call):
        bias = call.args.get("self") if call is not None and call.op in BIASED else None
        return node_operands(bias)  # which may be added by the kernel that reads the sum
    return node_operands(node.args[1:] if node.target is aten.copy.default else (node.args, node.kwargs))


BIASED = ("addmm", "baddbmm")
INLINED_NAMESPACES = ("aten", "prims", "quantized_decomposed")
"""Inductor has pointwise lowerings for operators of these. It calls all others."""


def _is_materialised(program: Program, node: Node, call: Call | None) -> bool:
    """Does Inductor write the result to memory before anything reads it?"""
    if isinstance(node.target, _private.HigherOrderOperator):
        return True
    if not isinstance(node.target, _private.OpOverload):
        return False
    if node.target.namespace not in INLINED_NAMESPACES:
        return True
    if node.target._schema.name.partition("::")[2] in SCATTERS:
        return True
    sizes = None if call is None else _summed_sizes(call)
    return sizes is not None and _is_a_loop(program, sizes)


def _summed_sizes(call: Call) -> list[Any] | None:
    """The sizes over which a reduction or a matrix product adds up; None for other operations."""
    first = next((call.args[name] for name in ("mat1", "batch1", "self") if name in call.args), None)
    x = tensor_fact(first)
    if is_gemm(call.op) and x is not None:
        # Inductor writes some products of few rows or columns as a sum of pointwise products
        return list(x.shape[-1:]) if call.op in (*BIASED, "matmul") else [math.inf]
    if not is_reduction(call.op) or x is None:
        return None
    dims = call.args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
    return [x.shape[dim] for dim in dims]


def _is_a_loop(program: Program, sizes: list[Any]) -> bool:
    """Are there too many elements per result for Inductor to unroll their sum? An unrolled sum is pointwise, and
    Inductor computes it where its result is read."""
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return True  # Inductor unrolls only what it can count
    name = "unroll_reductions_threshold"
    fewest = program.options.inductor_options.get(name, getattr(_private.inductor_config, name))
    return math.prod(sizes) >= fewest


def _has_elements(node: Node) -> bool:
    value = fact(node)
    return value is None or isinstance(value, (torch.Tensor, list, tuple))
