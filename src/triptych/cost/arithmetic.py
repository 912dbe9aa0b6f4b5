"""How many floating-point operations the products in a call take, and how many products there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from ..ir.calls import read
from ..ir.facts import fact, tensor_fact
from ..ir.sizes import elements, size_hint
from ..ir.work import declared_work, product_name

ATTENTION = ("scaled_dot_product", "flex_attention", "flash_attention", "efficient_attention")
BACKWARD_PRODUCTS = 2.5
"""Products of the backward of an attention for each one of its forward: it computes the scores again."""

LEFT_OPERANDS = ("mat1", "batch1", "mat", "input", "self", "a", "X", "qx")
"""Names of the left operand; `self` of `addmm` and its variants is what is added to the product."""

Arguments = Mapping[str, Any]


def flops(node: Node) -> float:
    """Floating-point operations of the products in a call: of matrices, of a convolution, of an attention."""
    declared = declared_work(node)
    if declared is not None:
        return declared.flops
    call = read(node)
    args: Arguments = {} if call is None else call.args
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0] if call is None else call.op
    count = _COUNTS.get(name)
    if count is not None:
        return count(node, args)
    if any(attention in name for attention in ATTENTION):
        return _attention(node, name, args)
    if re.fullmatch(r"conv(_transpose)?\d?d?|_?convolution\w*", name):
        return _convolution(node, {**args, "transposed": "transpose" in name or args.get("transposed")})
    return _product(node, args) if product_name(name) else 0.0


def count_products(node: Node) -> int:
    """How many products a call computes; a convolution and an attention count as one."""
    declared = declared_work(node)
    return int(flops(node) > 0) if declared is None else declared.gemms


def _product(node: Node, args: Arguments) -> float:
    """Elements of the result times the length of the sums, which is the last dim of the left operand."""
    result = next(tensors(fact(node)), None)
    left = _left_operand(node, args)
    if result is None or left is None:
        return 0.0
    return 2.0 * elements(result.shape) * (size_hint(left.shape[-1]) if left.dim() else 1)


def _left_operand(node: Node, args: Arguments) -> torch.Tensor | None:
    by_name = (tensor_fact(args.get(name)) for name in LEFT_OPERANDS)
    in_order = (tensor_fact(operand) for operand in (*node.args, *node.all_input_nodes))
    return next((operand for operand in (*by_name, *in_order) if operand is not None), None)


def _of_batches(node: Node, args: Arguments) -> float:
    """`addbmm` adds up the products of a batch."""
    left, right = tensor_fact(args.get("batch1")), tensor_fact(args.get("batch2"))
    return 2.0 * elements(left.shape) * size_hint(right.shape[-1]) if left is not None and right is not None else 0.0


def _outer(node: Node, args: Arguments) -> float:
    """An outer product adds up nothing."""
    result = tensor_fact(node)
    return 2.0 * elements(result.shape) if result is not None else 0.0


def _einsum(node: Node, args: Arguments) -> float:
    """Two operands at a time, as torch computes it; each index of either is one loop."""
    equation, operands = args.get("equation"), [tensor_fact(o) for o in args.get("operands", ())]
    if not isinstance(equation, str) or len(operands) < 2 or None in operands or "." in equation:
        return 0.0
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    sizes = {i: size_hint(s) for names, o in zip(inputs, operands) if o is not None for i, s in zip(names, o.shape)}
    result, total = inputs[0], 0.0
    for index, names in enumerate(inputs[1:], 1):
        together = set(result) | set(names)
        total += 2.0 * math.prod(sizes[name] for name in together)
        needed = set("".join(inputs[index + 1 :])) | set(equation.partition("->")[2])
        result = "".join(name for name in together if name in needed)
    return total


def _convolution(node: Node, args: Arguments) -> float:
    """Each element of the result is a sum over the weights of its channel; transposed, each element of the input is
    multiplied by those."""
    given, weight, result = tensor_fact(args.get("input")), tensor_fact(args.get("weight")), tensor_fact(node)
    if given is None or weight is None or result is None:
        return 0.0
    return 2.0 * elements((given if args.get("transposed") else result).shape) * elements(weight.shape[1:])


def _convolution_backward(node: Node, args: Arguments) -> float:
    """The gradients of the input and of the weight each take as many operations as the forward."""
    grad, given, weight = (tensor_fact(args.get(name)) for name in ("grad_output", "input", "weight"))
    if grad is None or given is None or weight is None:
        return 0.0
    forward = 2.0 * elements((given if args.get("transposed") else grad).shape) * elements(weight.shape[1:])
    return forward * sum(map(bool, args.get("output_mask", (True, True))[:2]))


def _attention(node: Node, name: str, args: Arguments) -> float:
    """Q times K, and the probabilities times V. A causal kernel leaves out half of that."""
    operands = [tensor_fact(operand) for operand in node.args]
    query, key, value = (
        tensor_fact(args.get(name)) if name in args else operands[at] if at < len(operands) else None
        for at, name in enumerate(("query", "key", "value"), start="backward" in name)
    )
    if query is None or key is None or value is None or query.dim() < 2 or key.dim() < 2:
        return 0.0
    heads_first = "scaled_dot_product" in name or "flex" in name or key.dim() < 4
    widths = size_hint(query.shape[-1]) + size_hint(value.shape[-1])
    forward = 2.0 * elements(query.shape[:-1]) * size_hint(key.shape[-2 if heads_first else 1]) * widths
    forward *= 0.5 if args.get("is_causal") else 1.0
    return forward * (BACKWARD_PRODUCTS if "backward" in name else 1.0)


_COUNTS: dict[str, Callable[[Node, Arguments], float]] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "einsum": _einsum,
    "addbmm": _of_batches,
    "addr": _outer,
    "outer": _outer,
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, or in a tuple or list of values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
