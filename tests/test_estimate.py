"""Estimates of single operators: bytes and floating-point operations by hand, and the time beside the clock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from estimates import OPERATORS, estimated, measured
from torch.fx.experimental.proxy_tensor import make_fx

from triptych.cost.arithmetic import flops
from triptych.cost.estimate import operation_cost

aten = torch.ops.aten
f16, f32, i64 = torch.float16, torch.float32, torch.int64


def t(*shape, dtype=f32):
    return torch.zeros(shape, dtype=dtype) if dtype == i64 else torch.randn(shape).to(dtype)


def conv_backward(mask):
    return lambda g, x, w: aten.convolution_backward(g, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)


HEADS = 2 * 4 * 32 * 16
"""Elements of a query: 2 sequences, 4 heads, 32 rows of 16."""

BY_HAND = {
    "mm": (torch.mm, [t(8, 32), t(32, 16)], 4 * (8 * 32 + 32 * 16 + 8 * 16), 2 * 8 * 16 * 32),
    "mm in 16 bits": (torch.mm, [t(8, 32, dtype=f16), t(32, 16, dtype=f16)], 2 * (8 * 32 + 32 * 16 + 8 * 16), 2 * 8 * 16 * 32),
    "one operand twice": (lambda x: x @ x, [t(8, 8)], 4 * (64 + 64), 2 * 8 * 8 * 8),
    "bmm": (torch.bmm, [t(3, 8, 32), t(3, 32, 16)], 4 * 3 * (8 * 32 + 32 * 16 + 8 * 16), 2 * 3 * 8 * 16 * 32),
    "addmm": (torch.addmm, [t(16), t(8, 32), t(32, 16)], 4 * (16 + 8 * 32 + 32 * 16 + 8 * 16), 2 * 8 * 16 * 32),
    "baddbmm": (torch.baddbmm, [t(3, 8, 16), t(3, 8, 32), t(3, 32, 16)], 4 * 3 * (8 * 32 + 32 * 16 + 2 * 8 * 16), 2 * 3 * 8 * 16 * 32),
    "addbmm": (torch.addbmm, [t(8, 16), t(3, 8, 32), t(3, 32, 16)], 4 * (3 * (8 * 32 + 32 * 16) + 2 * 8 * 16), 2 * 3 * 8 * 16 * 32),
    "mv": (torch.mv, [t(8, 32), t(32)], 4 * (8 * 32 + 32 + 8), 2 * 8 * 32),
    "dot": (torch.dot, [t(32), t(32)], 4 * (32 + 32 + 1), 2 * 32),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1), [t(2, 8, 10, 10), t(4, 8, 3, 3)],
        4 * (2 * 8 * 100 + 4 * 8 * 9 + 2 * 4 * 100), 2 * (2 * 4 * 100) * (8 * 9),
    ),
    "convolution, two groups": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=2), [t(2, 8, 10, 10), t(4, 4, 3, 3)],
        4 * (2 * 8 * 100 + 4 * 4 * 9 + 2 * 4 * 100), 2 * (2 * 4 * 100) * (4 * 9),
    ),
    "transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2), [t(2, 8, 10, 10), t(8, 4, 2, 2)],
        4 * (2 * 8 * 100 + 8 * 4 * 4 + 2 * 4 * 400), 2 * (2 * 8 * 100) * (4 * 4),
    ),
    "convolution backward": (
        conv_backward([True, True, False]), [t(2, 4, 10, 10), t(2, 8, 10, 10), t(4, 8, 3, 3)],
        4 * (2 * 4 * 100 + 2 * (2 * 8 * 100 + 4 * 8 * 9)), 2 * 2 * (2 * 4 * 100) * (8 * 9),
    ),
    "convolution backward, of the weight alone": (
        conv_backward([False, True, False]), [t(2, 4, 10, 10), t(2, 8, 10, 10), t(4, 8, 3, 3)],
        4 * (2 * 4 * 100 + 2 * 8 * 100 + 2 * 4 * 8 * 9), 2 * (2 * 4 * 100) * (8 * 9),
    ),
    "attention of a tensor with itself": (
        lambda x: F.scaled_dot_product_attention(x, x, x), [t(2, 4, 32, 16)],
        4 * (2 * HEADS + 2 * 4 * 32), 4 * HEADS * 32,
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [t(2, 4, 32, 16), t(2, 4, 32, 16), t(2, 4, 32, 16)],
        4 * (4 * HEADS + 2 * 4 * 32), 4 * HEADS * 32 / 2,
    ),
    "layer norm": (
        lambda x, w, b: aten.native_layer_norm(x, [16], w, b, 1e-5), [t(8, 16), t(16), t(16)],
        4 * (8 * 16 + 16 + 16 + 8 * 16 + 8 + 8), 0,
    ),
    "softmax": (lambda x: torch.softmax(x, -1), [t(8, 16)], 4 * 2 * 8 * 16, 0),
    "sum": (lambda x: x.sum(0), [t(8, 16)], 4 * (8 * 16 + 16), 0),
    "maximum": (lambda x: x.amax(), [t(8, 16)], 4 * (8 * 16 + 1), 0),
    "cumulative sum": (lambda x: x.cumsum(0), [t(8, 16)], 4 * 2 * 8 * 16, 0),
    "embedding": (lambda w, i: F.embedding(i, w), [t(1000, 16), t(8, dtype=i64)], 4 * 2 * 8 * 16 + 8 * 8, 0),
    "index": (lambda x, i: x[i], [t(1000, 16), t(8, dtype=i64)], 4 * 2 * 8 * 16 + 8 * 8, 0),
    "gather": (lambda x, i: x.gather(1, i), [t(8, 1000), t(8, 4, dtype=i64)], 4 * 2 * 8 * 4 + 8 * 8 * 4, 0),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), [t(8, 16), t(8, 4, dtype=i64), t(8, 4)], 4 * (2 * 8 * 16 + 8 * 4) + 8 * 8 * 4, 0),
    "cat": (lambda x, y: torch.cat([x, y]), [t(8, 16), t(4, 16)], 4 * 2 * 12 * 16, 0),
    "copy of a transpose": (lambda x: x.t().clone(memory_format=torch.contiguous_format), [t(8, 16)], 4 * 2 * 8 * 16, 0),
    "cast": (lambda x: x.to(torch.float64), [t(8, 16)], (4 + 8) * 8 * 16, 0),
    "add": (torch.add, [t(8, 16), t(8, 16)], 4 * 3 * 8 * 16, 0),
    "a row for all rows": (torch.add, [t(8, 16), t(16)], 4 * (2 * 8 * 16 + 16), 0),
    "an expanded operand": (lambda x, y: x + y.expand(8, 16), [t(8, 16), t(1, 16)], 4 * (2 * 8 * 16 + 16), 0),
    "zeros of a size": (torch.zeros_like, [t(8, 16)], 4 * 8 * 16, 0),
    "memory": (torch.empty_like, [t(8, 16)], 0, 0),
    "a view": (lambda x: x.t().reshape(16, 8).unsqueeze(0), [t(8, 16)], 0, 0),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_and_operations_are_those_counted_by_hand(name):
    program, inputs, moved, operations = BY_HAND[name]
    nodes = list(make_fx(program)(*inputs).graph.nodes)
    costs = [operation_cost(node) for node in nodes]
    assert sum(map(flops, nodes)) == operations
    assert sum(cost.bytes for cost in costs) == moved
    assert sum(cost.gemms for cost in costs) == (operations > 0)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_estimates_are_within_ten_times_of_the_clock(operator):
    """By the time of the thread, which other load on the machine hardly changes."""
    operands = operator.operands("cpu", f32)
    cost, _ = estimated(operator, operands)
    seconds = measured(operator, operands, "cpu")
    assert seconds / 10 < cost.seconds < 10 * seconds
