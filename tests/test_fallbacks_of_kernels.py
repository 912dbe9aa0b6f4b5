"""Operators that our passes write after AOTAutograd has decomposed the graph: Inductor calls them, and does not raise."""

from __future__ import annotations

import pytest
import torch

import triptych


class SiluByAten(triptych.Rule):
    """sigmoid(x) * x -> silu(x), after silu itself has been decomposed; up to rounding"""

    stages = ("joint",)

    def pattern(self, op, x):
        return op.mul(op.sigmoid(x), x)

    def rewrite(self, op, x):
        return op.silu(x)


def swapped(x, y):
    """Of two halves, one of which was written: `splitwithsizes_cat_replace` puts a flip into the graph."""
    a, b = x.chunk(2, 1)
    a.add_(1)
    return torch.cat([b, a], 1) * y


def thirds(x, y):
    a, b, c = x.chunk(3, 1)
    b.mul_(2)
    return torch.cat([c, b, a], 1) * y


@pytest.mark.parametrize("program", [swapped, thirds])
def test_pieces_in_reverse_order(program):
    results = []
    for call in (program, torch.compile(program, backend=triptych.compile_fx, options={"on_error": "raise"})):
        x, y = torch.arange(12.0).reshape(2, 6), torch.full((2, 6), 3.0, requires_grad=True)
        result = call(x, y)
        result.sum().backward()
        results.append((result, x, y.grad))
    torch.testing.assert_close(*results)


def test_an_operator_of_a_users_rule():
    program = lambda x: torch.sigmoid(x) * x  # noqa: E731
    x = torch.randn(4, 8)
    options = {"on_error": "raise", "add_rules": [SiluByAten]}
    with triptych.record() as explanation:
        got = torch.compile(program, backend=triptych.compile_fx, options=options)(x)
    torch.testing.assert_close(got, program(x))
    assert "silu" in str(explanation.graphs["joint"].code)
