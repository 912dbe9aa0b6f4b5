"""Taking apart and putting together: which piece of which value a node is, and random programs."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from triptych.ir.program import Program
from triptych.ir.verify import verify
from triptych.options import Options
from triptych.passes.base import PassRun
from triptych.pre_grad.merge_concats_pass import MergeConcatsPass
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.pre_grad.normalize_node_kwargs_pass import NormalizeNodeKwargsPass
from triptych.pre_grad.pieces import piece_of, runs
from triptych.pre_grad.remove_split_ops_pass import RemoveSplitOpsPass
from triptych.pre_grad.stack_to_unsqueeze_pass import StackToUnsqueezePass
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture_torch
from triptych.testing.check import compare_graphs
from triptych.testing.fuzz import random_program

PASSES = [
    NormalizationPassAten,
    NormalizeNodeKwargsPass,
    MergeConcatsPass,
    RemoveSplitOpsPass,
    StackToUnsqueezePass,
]


def run_passes(gm, inputs=()):
    program = Program(gm, inputs)
    fired = {}
    for pass_ in PASSES:
        run = PassRun(Rewriter(program, pass_.name), Options(), strict=True)
        pass_().run(run)
        fired.update(run.tally.fired)
    gm.graph.lint()
    gm.recompile()
    verify(gm)
    return fired


@pytest.mark.parametrize(
    "program, bounds, single",
    [
        (lambda x: x.split([1, 3, 4], 1)[1], (1, 4), False),
        (lambda x: x.chunk(3, -1)[-1], (6, 8), False),
        (lambda x: x[:, 2:], (2, 8), False),
        (lambda x: x.narrow(1, 3, 2), (3, 5), False),
        (lambda x: x.unbind(1)[3], (3, 4), True),
        (lambda x: x[:, -1], (7, 8), True),
    ],
)
def test_piece(program, bounds, single):
    gm, _ = capture_torch(program, [torch.randn(4, 8)])
    (returned,) = list(gm.graph.nodes)[-1].args[0]
    piece = piece_of(Program(gm), returned)
    assert (piece.start, piece.end) == bounds and piece.dim == 1 and piece.single == single
    assert piece.source.op == "placeholder"


@pytest.mark.parametrize("program", [lambda x: x[:, ::2], lambda x: x.relu(), lambda x: x.max(1)[0]])
def test_no_piece(program):
    gm, _ = capture_torch(program, [torch.randn(4, 8)])
    (returned,) = list(gm.graph.nodes)[-1].args[0]
    assert piece_of(Program(gm), returned) is None


def test_runs_are_of_neighbours_in_order():
    def program(x, y):
        a, b, c = x.split([1, 3, 4], 1)
        return a, b, y * 2, c, x[:, :1]

    gm, _ = capture_torch(program, [torch.randn(4, 8), torch.randn(4)])
    returned = list(gm.graph.nodes)[-1].args[0]
    found = runs(piece_of(Program(gm), n) for n in returned)
    assert [None if r is None else (r.pieces[0].start, r.pieces[-1].end) for r in found] == [
        (0, 4), None, (4, 8), (0, 1)
    ]  # fmt: skip


def test_a_chain_of_passes_leaves_the_source():
    """Every call form at once: nothing is left of taking apart and putting together."""

    def program(x):
        a, b = x.chunk(2, dim=-1)
        c, d = b.split([1, 3], -1)
        whole = torch.concat((torch.hstack([a, c]), d), axis=1)
        return torch.stack(torch.unbind(whole)) * 2

    gm, inputs = capture_torch(program, [torch.randn(4, 8)])
    before = copy.deepcopy(gm)
    run_passes(gm)
    compare_graphs(before, gm, inputs)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [torch.mul]


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_their_meaning(seed):
    numbers = random.Random(seed)
    gm, inputs = random_program(lambda below: numbers.randrange(max(below, 1)), steps=14)
    before = copy.deepcopy(gm)
    run_passes(gm, inputs)
    compare_graphs(before, gm, inputs)


@pytest.mark.parametrize("seed", range(60, 90))
def test_random_aten_programs_keep_their_meaning(seed):
    numbers = random.Random(seed)
    gm, inputs = random_program(lambda below: numbers.randrange(max(below, 1)), steps=14)
    with torch.no_grad():
        gm = make_fx(torch.func.functionalize(gm), tracing_mode="fake")(*[t.clone() for t in inputs])
    before = copy.deepcopy(gm)
    run_passes(gm)
    compare_graphs(before, gm, inputs)


def test_gradients_are_the_same():
    def program(x, y):
        a, b = x.chunk(2, 1)
        c, d = b.chunk(2, 1)
        whole = torch.cat([torch.cat([a, c], 1), d, y], 1)
        return (torch.stack(whole.unbind(1)) ** 2).sum() + torch.stack([a]).sum()

    inputs = [torch.randn(4, 8, requires_grad=True), torch.randn(4, 2, requires_grad=True)]
    gm, _ = capture_torch(program, inputs)
    expected = torch.autograd.grad(program(*inputs), inputs)
    assert run_passes(gm)
    (result,) = gm(*inputs)
    for want, got in zip(expected, torch.autograd.grad(result, inputs), strict=True):
        assert torch.equal(want, got)
