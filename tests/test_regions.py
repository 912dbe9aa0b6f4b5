"""Regions (`torch.compiler.nested_compile_region`) in training, through kernels: their results share memory."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

import triptych
from tests.compare import check_training
from triptych import _private
from triptych.ir.program import Program
from triptych.post_grad.region_results import SharedRegionResult
from triptych.rewrite.driver import run_rules
from triptych.rewrite.rewriter import Rewriter

region = torch.compiler.nested_compile_region


@region
def exponential(x):
    return x.exp()


@region
def weights(x, y):
    return (x.sin() + y).softmax(-1)


@region
def layer(x, w):
    return (x.reshape(-1, 4) @ w).tanh().view(2, 2, 4)


PROGRAMS = {
    "a result that the backward needs": lambda x: exponential(x) + exponential(x * 2),
    "one region after the other": lambda x: exponential(exponential(x) * 0.1) * 2,
    "several operands": lambda x: weights(x, x * 2) + weights(x * 2, x),
    "views of operands and results": lambda x: layer(layer(x, x[0, 0] * torch.eye(4)), torch.eye(4)) + x,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_gradients(program):
    """Inductor reuses memory of one result for another, and of a gradient that is still to be read."""
    options = {"on_error": "raise"}
    check_training(PROGRAMS[program], (torch.randn(2, 2, 4),), backend=triptych.compile_fx, options=options)


def test_two_views_of_memory_that_is_not_returned_become_apart():
    body = Graph()
    y = body.call_function(torch.ops.aten.exp.default, (body.placeholder("x"),))
    flat = body.call_function(torch.ops.aten.view.default, (y, [4]))
    turned = body.call_function(torch.ops.aten.permute.default, (y, [1, 0]))
    body.output((flat, turned))
    graph = Graph()
    x = graph.placeholder("x")
    arguments = (graph.get_attr("body"), "body", x)
    call = graph.call_function(_private.invoke_subgraph, arguments)
    graph.output(tuple(graph.call_function(operator.getitem, (call, place)) for place in (1, 0)))
    gm = GraphModule({"body": GraphModule({}, body)}, graph)

    program = Program(gm, [torch.randn(2, 2)])
    run_rules(Rewriter(program), [SharedRegionResult()])
    value = torch.randn(2, 2)
    turned, flat = gm(value)
    assert torch.equal(turned, value.exp().t()) and torch.equal(flat, value.exp().view(4))
    assert turned.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
