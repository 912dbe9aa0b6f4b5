"""How torch's kernels on a GPU differ from kernels at its limits, for operations that run by themselves.

The figures are of an H200 and half precision (`bench/estimates.py` shows estimates beside the clock). They are for
reports only: no rewrite is decided by them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from ..ir.calls import Call, read
from ..ir.facts import known, known_equal, tensor_fact
from .device import HALF, DeviceModel

DEPTHWISE = 1.6e12
"""Floating-point operations a second in convolutions with one filter for each channel."""

MOVES = {
    "native_layer_norm": 2.0, "layer_norm": 2.0, "native_layer_norm_backward": 2.0, "native_batch_norm": 5.0,
    "batch_norm": 5.0, "_native_batch_norm_legit": 5.0, "cumsum": 2.5, "cumprod": 2.5,
}  # fmt: skip
"""How much longer than moving its operands an operation takes."""
ADDITIONS = {"index_add": 8.0, "scatter_add": 8.0, "index_put": 8.0, "embedding_dense_backward": 8.0}
"""The same for 16-bit numbers that are added one by one to an element, each after the other."""
REORDERED = 5.0
"""The same for a copy to another order in memory."""


class LibraryKernel(NamedTuple):
    times: float = 1.0
    """How often it moves the operands."""
    rate: float = 1.0
    """The fraction of the usual rate that its arithmetic reaches."""
    launches: int = 1


def kernel_of_library(node: Node, model: DeviceModel) -> LibraryKernel:
    """The kernel that computes an operation by itself."""
    call = read(node)
    if call is None or not model.is_gpu:
        return LibraryKernel()
    if call.op in MOVES:
        return LibraryKernel(times=MOVES[call.op])
    if "conv" in call.op:
        return _convolution(call, model)
    result, source = tensor_fact(node), tensor_fact(call.args.get("self"))
    if call.op in ADDITIONS and result is not None and result.dtype in HALF:
        return LibraryKernel(times=ADDITIONS[call.op])
    if call.op in ("clone", "contiguous", "copy") and source is not None and result is not None:
        innermost = source.dim() > 1 and known(source.stride(-1) == 1) is not known(result.stride(-1) == 1)
        return LibraryKernel(times=REORDERED if innermost else 1.0)
    return LibraryKernel()


def _convolution(call: Call, model: DeviceModel) -> LibraryKernel:
    given, weight = tensor_fact(call.args.get("input")), tensor_fact(call.args.get("weight"))
    if given is None or weight is None:
        return LibraryKernel()
    products = 2 if "backward" in call.op else 1
    a_filter_for_each_channel = known_equal(weight.shape[1], 1) and not known_equal(given.shape[1], 1)
    if a_filter_for_each_channel:
        return LibraryKernel(rate=DEPTHWISE / model.flops(given.dtype), launches=products)
    if given.dtype not in HALF or known(given.stride(1) == 1):
        return LibraryKernel(launches=products)
    return LibraryKernel(times=3.0, launches=3 * products)  # operands and result are copied to and from channels-last
