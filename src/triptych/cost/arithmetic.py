"""How many floating-point operations the products in a call take, and how many products there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..ir.calls import Call, read
from ..ir.facts import fact, known, known_equal, tensor_fact
from ..ir.sizes import elements, size_hint
from ..ir.traits import is_gemm
from .device import HALF, DeviceModel

ATTENTION = "scaled_dot_product"
BACKWARD_PRODUCTS = 2.5
"""Products of the backward of an attention for each one of its forward: it computes the scores again."""

DEPTHWISE = 1.6e12
"""Floating-point operations a second of a GPU in convolutions with one filter for each channel."""
NORMS = {"native_layer_norm", "layer_norm", "native_layer_norm_backward"}

LEFT_OPERANDS = ("mat1", "batch1", "mat", "input", "self", "a")
"""Names of the left operand; `self` of `addmm` and its variants is what is added to the product."""

Arguments = Mapping[str, Any]


def flops(node: Node) -> float:
    """Floating-point operations of a product, a convolution or an attention; 0 of everything else."""
    call = read(node)
    if call is None:
        return 0.0
    count = _COUNTS.get(call.op)
    if count is not None:
        return count(node, call.args)
    if ATTENTION in call.op:
        return _attention(node, call)
    if re.fullmatch(r"conv(_transpose)?\d?d?", call.op):
        return _convolution(node, {**call.args, "transposed": "transpose" in call.op})
    return _product(node, call.args) if is_gemm(call.op) else 0.0


class LibraryKernel(NamedTuple):
    """How a kernel of a library differs from one at the limits of the device."""

    times: float = 1.0
    """How often it moves the operands."""
    rate: float = 1.0
    """The fraction of the usual rate that its arithmetic reaches."""
    launches: int = 1


def kernel_of_library(node: Node, model: DeviceModel) -> LibraryKernel:
    """The kernel that computes an operation by itself on a GPU, as measured on an H200."""
    call = read(node)
    if call is None or not model.is_gpu:
        return LibraryKernel()
    if call.op in NORMS:
        return LibraryKernel(times=2.0)
    given, weight = tensor_fact(call.args.get("input")), tensor_fact(call.args.get("weight"))
    if "conv" not in call.op or given is None or weight is None:
        return LibraryKernel()
    products = 2 if "backward" in call.op else 1
    a_filter_for_each_channel = known_equal(weight.shape[1], 1) and not known_equal(given.shape[1], 1)
    if a_filter_for_each_channel:
        return LibraryKernel(rate=DEPTHWISE / model.flops(given.dtype), launches=products)
    if given.dtype not in HALF or known(given.stride(1) == 1):
        return LibraryKernel(launches=products)
    return LibraryKernel(times=3.0, launches=3 * products)  # operands and result are copied to and from channels-last


def _product(node: Node, args: Arguments) -> float:
    """Elements of the result times the length of the sums, which is the last dim of the left operand."""
    result = next(tensors(fact(node)), None)
    operands = (tensor_fact(args.get(name)) for name in LEFT_OPERANDS)
    left = next((operand for operand in operands if operand is not None), None)
    if result is None or left is None:
        return 0.0
    return 2.0 * elements(result.shape) * (size_hint(left.shape[-1]) if left.dim() else 1)


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


def _attention(node: Node, call: Call) -> float:
    """Q times K, and the probabilities times V. A causal kernel leaves out half of that."""
    query, key, value = (tensor_fact(call.args.get(name)) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or query.dim() < 2 or key.dim() < 2:
        return 0.0
    widths = size_hint(query.shape[-1]) + size_hint(value.shape[-1])
    forward = 2.0 * elements(query.shape[:-1]) * size_hint(key.shape[-2]) * widths
    forward *= 0.5 if call.args.get("is_causal") else 1.0
    return forward * (BACKWARD_PRODUCTS if "backward" in call.op else 1.0)


_COUNTS: dict[str, Callable[[Node, Arguments], float]] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "einsum": _einsum,
    "addbmm": _of_batches,
    **dict.fromkeys(("mv", "addmv", "dot", "vdot"), _product),
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
