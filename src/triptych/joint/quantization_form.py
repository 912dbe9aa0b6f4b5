"""Quantization in one form each: functions kept whole for their scheme, and quantizing by numbers."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from .. import _private
from ..ir.facts import fact, set_fact
from ..ir.values import knowledge
from ..passes.base import PassRun
from ..rewrite.checks import PlainTerms

QUANTIZED = "quantized_decomposed"
"""The namespace of quantization as exported programs write it."""

BY_TENSORS = {"tensor": 2, "tensor2": 4}
"""Overloads that take their parameters as tensors of one element, and how many: scale, zero point, both bounds."""


def quantize_by_numbers(run: PassRun, node: Node) -> None:
    """quantize_per_tensor.tensor(x, scale, zero_point, ...) -> quantize_per_tensor(x, 0.1, 3, ...), of known tensors

    The overload for tensors reads their numbers and goes on as the one for numbers, which is what kernels and patterns
    know. `dequantize_per_tensor` likewise. Where the tensors come in from outside the two are different operations.
    """
    target: Any = node.target
    count = BY_TENSORS.get(target._overloadname)
    if count is None or not target.overloadpacket.__name__.endswith("quantize_per_tensor") or len(node.args) < 6:
        return
    with _private.without_dispatch_modes():
        found = [_number(run, operand) for operand in node.args[1 : 1 + count]]
    if any(value is None for value in found):
        run.declined("quantize_by_numbers", node, "scale and zero point are not known")
        return
    scale, *rest = found
    if not all(isinstance(value, int) for value in rest):
        run.declined("quantize_by_numbers", node, "a zero point that is no whole number")
        return
    args = (node.args[0], float(scale), *rest, *node.args[1 + count :])
    run.rewriter.set_arguments(node, args, dict(node.kwargs), target=target.overloadpacket.default)
    run.fired("quantize_by_numbers")


def _number(run: PassRun, operand: Any) -> Any:
    """The number a tensor is known to hold."""
    if not isinstance(operand, Node):
        return operand
    value = knowledge(run.program).uniform(operand)
    return None if value is None else value.item()


def quantization_form(run: PassRun, node: Node) -> None:
    """invoke_quant_packed(f, x, options) -> invoke_quant(f, x), its options beside it, its result not in a tuple

    Code generation knows only the second form.
    """
    options = node.kwargs.get("quant_options")
    given = (options.args, options.kwargs) if isinstance(options, Node) else ((), {})
    node.meta["quant_options"] = _private.InvokeQuant(*given[0], **given[1])
    kwargs = {k: v for k, v in node.kwargs.items() if k != "quant_options"}
    run.rewriter.set_arguments(node, node.args, kwargs, target=_private.invoke_quant)
    if isinstance(options, Node) and not options.users:
        run.rewriter.erase(options)
    _take_out_of_tuple(run, node)
    run.fired("quantization_form")


def _take_out_of_tuple(run: PassRun, node: Node) -> None:
    piece: Node | None = next(iter(node.users), None)
    function: Any = node.args[0]
    if piece is None or len(node.users) != 1 or piece.target is not operator.getitem or piece.args[1] != 0:
        return
    body = getattr(run.program.gm, str(function.target)) if isinstance(function, Node) else None
    if not isinstance(body, GraphModule) or not isinstance(function, Node) or len(function.users) != 1:
        return
    (end,) = body.graph.find_nodes(op="output")
    results = end.args[0]
    if not isinstance(results, (list, tuple)) or len(results) != 1:
        return
    end.args = (results[0],)
    body.recompile()
    set_fact(node, fact(piece), run.program.fact_key)
    run.rewriter.replace(piece, node, run.rewriter.emitter(piece), terms=PlainTerms(returns_operand=True))
