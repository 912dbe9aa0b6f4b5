"""Canonical forms of quantization: of calls of `invoke_quant`, and of quantize and dequantize operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import _private
from ..ir.modules import attribute
from ..ir.program import Program
from ..ir.values import knowledge
from ..rewrite.edits import Annotate, Edit, EraseUnused, SetArguments, TakeOutOfTuple, Together
from ..rewrite.examples import declines, fires
from ..rewrite.rule import Match, Rule

QUANTIZED = "quantized_decomposed"
"""The namespace of quantization as exported programs write it."""

BY_TENSORS = {"tensor": 2, "tensor2": 4}
"""Overloads that take their parameters as tensors of one element, and how many: scale, zero point, both bounds."""


def _quantize(x, scale, zero_point):
    assert _private.quantized_operators  # this access registers the operators
    quantized = torch.ops.quantized_decomposed
    return quantized.quantize_per_tensor.tensor(x, scale, zero_point, -128, 127, torch.int8)


class QuantizeByNumbers(Rule):
    """quantize_per_tensor.tensor(x, scale, zero_point, ...) -> quantize_per_tensor(x, 0.1, 3, ...), of known tensors

    The overload for tensors reads the numbers and then does the same as the overload for numbers, which is the one that
    kernels and patterns know. The same holds for `dequantize_per_tensor`. The rule declines if the numbers are not
    known when the graph is compiled.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for node in list(program.graph.nodes):
            target: Any = node.target
            if not isinstance(target, _private.OpOverload) or target.namespace != QUANTIZED or len(node.args) < 6:
                continue
            count = BY_TENSORS.get(target._overloadname)
            if count is not None and target.overloadpacket.__name__.endswith("quantize_per_tensor"):
                yield Match.at(program, node, count=count)

    def check(self, m, count):
        numbers = [knowledge(m.program).number(operand) for operand in m.root.node.args[1 : 1 + count]]
        for operand, number in zip(m.root.node.args[1 : 1 + count], numbers):
            at = operand if isinstance(operand, Node) else None
            m.require(number is not None, "scale and zero point are not known", at=at)
        fraction = next((n for n in numbers[1:] if not isinstance(n, int)), None)
        m.require(fraction is None, "a zero point or bound is {found}, which is not an integer", found=fraction)
        m.bindings["numbers"] = numbers

    def rewrite(self, op, m, count):
        node = m.root.node
        scale, *rest = m.bindings["numbers"]
        args = (node.args[0], float(scale), *rest, *node.args[1 + count :])
        return SetArguments(node, args, node.kwargs, target=node.target.overloadpacket.default)

    examples = [
        fires(lambda x: _quantize(x, torch.full((), 0.1), torch.full((), 3)), "f32[4, 8]", dialects=("aten",)),
        declines(_quantize, "f32[4, 8]", torch.tensor(0.1), torch.tensor(3), because="not known", dialects=("aten",)),
        declines(lambda x: _quantize(x, torch.full((), 0.1), torch.full((), 3.0)), "f32[4, 8]", because="not an int",
                 dialects=("aten",)),
    ]  # fmt: skip


def _kept_whole(x, w, s):
    def dequantize(w, s):
        return w.to(torch.float32) * s

    return x @ _private.InvokeQuant(codegen_low_precision=False)(dequantize, w, s, scheme="int8")


class QuantizationForm(Rule):
    """invoke_quant_packed(f, x, options) -> invoke_quant(f, x), its options as metadata, its result not in a tuple

    Code generation knows only the second form.
    """

    def sites(self, program: Program) -> Iterator[Match]:
        for node in program.graph.find_nodes(op="call_function", target=_private.invoke_quant_packed):
            yield Match.at(program, node)

    def rewrite(self, op, m):
        node = m.root.node
        options = node.kwargs.get("quant_options")
        settings = (options.args, options.kwargs) if isinstance(options, Node) else ((), {})
        kwargs = {k: v for k, v in node.kwargs.items() if k != "quant_options"}
        edits: list[Edit] = [
            SetArguments(node, node.args, kwargs, target=_private.invoke_quant),
            Annotate(node, "quant_options", _private.InvokeQuant(*settings[0], **settings[1])),
        ]
        if isinstance(options, Node):
            edits.append(EraseUnused([options]))
        if (only_result := _only_result(m.program, node)) is not None:
            edits.append(TakeOutOfTuple(node, *only_result))
        return Together(edits)

    examples = [
        fires(_kept_whole, "f32[4, 8]", "i8[8, 8]", "f32[8]", dialects=("torch",)),
        declines(_kept_whole, "f32[4, 8]", "i8[8, 8]", "f32[8]", dialects=("aten",)),  # it is inlined there
    ]


def _only_result(program: Program, node: Node) -> tuple[Node, GraphModule] | None:
    """The node that takes the one result out of the tuple, and the graph that is called, if nobody else calls it."""
    element: Node | None = next(iter(node.users), None)
    function: Any = node.args[0]
    if element is None or len(node.users) != 1 or element.target is not operator.getitem or element.args[1] != 0:
        return None
    if not isinstance(function, Node) or len(function.users) != 1:
        return None
    body = attribute(program.gm, function.target)
    if not isinstance(body, GraphModule):
        return None
    (end,) = body.graph.find_nodes(op="output")
    results = end.args[0]
    return (element, body) if isinstance(results, (list, tuple)) and len(results) == 1 else None
