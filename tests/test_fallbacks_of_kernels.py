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


@torch.library.custom_op("triptych_fallbacks::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
    out.copy_(x * factor)


def rows_of_zeros(x, cache):
    rows = torch.zeros(3, *x.shape)
    fill(x, rows[1])
    fill(x, rows[2], 3.0)
    return rows


def rows_of_an_input(x, cache):
    fill(x, cache[1])
    part = cache[2]
    fill(x + 1, part, 2.0)
    return part + 0


def a_column(x, cache):
    columns = x.repeat(2, 1)
    fill(x[:, 0], columns[-x.shape[0] :, 1])
    return columns


def a_row_of_a_view_of_an_input(x, cache):
    later = cache[1:]
    fill(x, later[1])
    return later * 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [rows_of_zeros, rows_of_an_input, a_column, a_row_of_a_view_of_an_input])
def test_a_custom_operator_writes_the_view_that_it_is_given(program, dynamic):
    """With symbolic sizes the offset of the view is a node of the graph, for which stock Inductor takes 0."""
    compiled = torch.compile(program, backend=triptych.compile_fx, dynamic=dynamic, options={"on_error": "raise"})
    for given in (lambda: torch.zeros(3, 4, 5), lambda: torch.zeros(4, 4, 5)[1:]):
        results = []
        for call in (program, compiled):
            x, cache = torch.arange(20.0).reshape(4, 5) + 1, given()
            results.append((call(x, cache), cache))
        torch.testing.assert_close(*results)


def test_a_tensor_made_of_an_offset():
    def program(x):
        row = x[2]
        return x.as_strided((2, 2), (x.shape[1], 1), row.storage_offset() + 1), row * row.storage_offset()

    x = torch.arange(24.0).reshape(4, 6)
    compiled = torch.compile(program, backend=triptych.compile_fx, dynamic=True, options={"on_error": "raise"})
    torch.testing.assert_close(compiled(x), program(x))
