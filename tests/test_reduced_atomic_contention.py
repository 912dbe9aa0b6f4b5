"""Additions of many rows to a few, spread over copies of the rows: equal to eager, and chosen where it is quicker."""

from __future__ import annotations

import pytest
import torch

import triptych
from tests.compare import check_inference, check_training
from triptych.cost.device import USUAL
from triptych.passes.session import watching
from triptych.post_grad import reduced_atomic_contention as module

SPREAD = {"reduced_atomic_contention.copies": 4, "on_error": "raise"}
CODEGENS = ["eager", "inductor"]


def fired(sessions):
    return sum(r.fired["spread_additions"] for s in sessions for r in s.records)


@pytest.mark.parametrize("codegen", CODEGENS)
@pytest.mark.parametrize("padding", [None, 1])
def test_the_gradient_of_an_embedding(codegen, padding):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.types = torch.nn.Embedding(3, 5, padding)

        def forward(self, tokens):
            return self.types(tokens).sin()

    tokens = torch.randint(0, 3, (4, 7))
    with watching() as sessions:
        check_training(Model(), (tokens,), backend=triptych.compile_fx, options={"codegen": codegen, **SPREAD})
    assert fired(sessions) == 1


@pytest.mark.parametrize("codegen", CODEGENS)
def test_additions_to_what_is_there(codegen):
    def program(t, i, v):
        return t.index_add(0, i, v), t.index_put((i,), v, accumulate=True), torch.index_add(t[:0], 0, i[:0], v[:0])

    given = torch.randn(3, 5), torch.tensor([2, 0, 0, 1, 2, 2, 0]), torch.randn(7, 5)
    with watching() as sessions:
        check_inference(program, given, backend=triptych.compile_fx, options={"codegen": codegen, **SPREAD})
    assert fired(sessions) >= 2


@pytest.mark.parametrize("codegen", CODEGENS)
def test_an_index_out_of_range_still_raises(codegen):
    compiled = torch.compile(
        lambda t, i, v: t.index_put((i,), v, accumulate=True), backend=triptych.compile_fx, options={"codegen": codegen, **SPREAD}
    )
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        compiled(torch.zeros(3, 5), torch.tensor([0, 3]), torch.ones(2, 5))


def test_rows_that_may_be_many_are_left_alone():
    with watching() as sessions:
        compiled = torch.compile(
            lambda t, i, v: t.index_add(0, i, v), backend=triptych.compile_fx, dynamic=True, options={"codegen": "eager", **SPREAD}
        )
        t, i, v = torch.randn(3, 5), torch.tensor([2, 0, 0, 1]), torch.randn(4, 5)
        torch.testing.assert_close(compiled(t, i, v), t.index_add(0, i, v))
    assert not fired(sessions)
    assert any("not known" in d.reason for s in sessions for r in s.records for d in r.declines)


def additions(count, rows, width=64):
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("target", "index", "values")]
    shapes = (rows, width), (count,), (count, width)
    for node, shape, dtype in zip(nodes, shapes, (torch.float32, torch.int64, torch.float32)):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return module._Additions(*nodes, None)


@pytest.mark.parametrize("count, rows, copies", [(8192, 2, 64), (8192, 1024, 8), (8192, 50_000, 1), (0, 4, 1), (5, 0, 1)])
def test_copies_have_no_more_rows_than_are_added(count, rows, copies):
    assert module._copies(additions(count, rows)) == copies


def test_what_is_timed_runs():
    for copies in (1, 4):
        part = module._added(additions(40, 3), copies).parts[0]
        sums = part.prepare(torch.device("cpu"))()
        assert tuple(sums.shape) == (copies * 3, 64)
        torch.testing.assert_close(sums.sum(), torch.tensor(40.0 * 64))


def test_few_rows_make_threads_wait():
    """As the model of a GPU has it: a gradient of two rows pays, one of a vocabulary does not."""
    before, after = (module._added(additions(65536, 2, 768), copies).seconds(USUAL) for copies in (1, 64))
    assert after < 0.95 * before
    before, after = (module._added(additions(16384, 8192, 768), copies).seconds(USUAL) for copies in (1, 2))
    assert after > before
