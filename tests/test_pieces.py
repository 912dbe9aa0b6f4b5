"""Taking apart and putting together: which piece of which value a node is, and random programs."""

from __future__ import annotations

import copy
import random
from operator import getitem

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import triptych
from tests.counting import counting_passes, grows
from triptych.ir.program import Program
from triptych.pieces.blocks import Block, neighbours_joined, progressions_joined
from triptych.pieces.read import way_of
from triptych.pre_grad.merge_concats_pass import MergeConcatsPass
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.pre_grad.normalize_node_kwargs_pass import NormalizeNodeKwargsPass
from triptych.pre_grad.remove_split_ops_pass import RemoveSplitOpsPass
from triptych.pre_grad.stack_to_unsqueeze_pass import StackToUnsqueezePass
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture_torch
from triptych.testing.check import compare_graphs
from triptych.testing.fuzz import random_program
from triptych.verify.structure import verify

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
        fired.update(pass_().run(Rewriter(program, pass_.name), strict=True).fired)
    gm.graph.lint()
    gm.recompile()
    verify(gm)
    return fired


def way_to(program, *inputs, **how):
    gm, _ = capture_torch(program, inputs, **how)
    (returned,) = list(gm.graph.nodes)[-1].args[0]
    return way_of(Program(gm), returned)


def written(axes):
    return [[(f.dim, f.step, f.size) for f in axis] for axis in axes]


@pytest.mark.parametrize(
    "program, offsets, axes",
    [
        (lambda x: x.split([1, 3, 4], 1)[1], (0, 1), [[(0, 1, 4)], [(1, 1, 3)]]),
        (lambda x: x.chunk(3, -1)[-1], (0, 6), [[(0, 1, 4)], [(1, 1, 2)]]),
        (lambda x: x[:, 2:], (0, 2), [[(0, 1, 4)], [(1, 1, 6)]]),
        (lambda x: x[:, 1::3], (0, 1), [[(0, 1, 4)], [(1, 3, 3)]]),
        (lambda x: x.narrow(1, 3, 2), (0, 3), [[(0, 1, 4)], [(1, 1, 2)]]),
        (lambda x: x.unbind(1)[3], (0, 3), [[(0, 1, 4)]]),
        (lambda x: x[:, -1], (0, 7), [[(0, 1, 4)]]),
        (lambda x: x[1:3, None, 5], (1, 5), [[(0, 1, 2)], []]),
        (lambda x: x.chunk(2)[1].chunk(2)[1], (3, 0), [[], [(1, 1, 8)]]),
        (lambda x: x.chunk(2)[1].reshape(4, 4), (2, 0), [[(0, 1, 2), (1, 4, 2)], [(1, 1, 4)]]),
        (lambda x: x.chunk(2)[1].t().flip(0), (2, 7), [[(1, -1, 8)], [(0, 1, 2)]]),
        (lambda x: x[:1].expand(3, 8), (0, 0), [[(None, 0, 3)], [(1, 1, 8)]]),
        (lambda x: x[:, :6].unflatten(1, (2, 3))[:, 1], (0, 3), [[(0, 1, 4)], [(1, 1, 3)]]),
    ],
)
def test_way(program, offsets, axes):
    way = way_to(program, torch.randn(4, 8))
    assert way.map.offsets == offsets and written(way.map.axes) == axes
    assert way.source.op == "placeholder" and way.nodes


@pytest.mark.parametrize(
    "program", [lambda x: x.relu(), lambda x: x.max(1)[0], lambda x: x.t(), lambda x: x[torch.tensor([1, 0])]]
)
def test_no_piece_is_its_own_source(program):
    way = way_to(program, torch.randn(4, 8))
    assert not way.nodes and way.source.op != "placeholder"


def test_the_source_is_what_was_taken_apart():
    way = way_to(lambda x: x.t().chunk(2)[1], torch.randn(4, 8))
    assert way.ops == {"split"} and way.source.op == "call_method"


def blocks_of(program, *inputs):
    gm, _ = capture_torch(program, inputs)
    returned = list(gm.graph.nodes)[-1].args[0]
    ways = [way_of(Program(gm), n) for n in returned]
    return [Block(w.map, (w,)) for w in ways]


def test_neighbours_in_order_are_one_block():
    def program(x, y):
        a, b, c = x.split([1, 3, 4], 1)
        return a, b, y * 2, c, x[:, :1]

    found = neighbours_joined(blocks_of(program, torch.randn(4, 8), torch.randn(4)), 1)
    assert [b.count for b in found] == [2, 1, 1, 1]
    assert written(found[0].map.axes) == [[(0, 1, 4)], [(1, 1, 4)]]


@pytest.mark.parametrize(
    "rows, counts",
    [
        ((0, 2, 4, 6), [4]), ((3, 2, 1), [3]), ((5, 5, 5), [3]), ((0, 4, 1, 5, 2, 6), [6]), ((0, 1, 2, 7), [3, 1]),
        ((0, 1, 4, 5), [4]), ((0, 3, 4, 5), [1, 3]), ((7, 0, 1, 2), [1, 3]),
    ],
)  # fmt: skip
def test_rows_at_equal_distances_are_one_block(rows, counts):
    blocks = blocks_of(lambda x: [x[i : i + 1] for i in rows], torch.randn(8, 3))
    found = progressions_joined(neighbours_joined(blocks, 0), 0)
    assert [b.count for b in found] == counts


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


GRADIENTS = {
    "split and cat": lambda x, y: (torch.cat([torch.cat([x[:, :3], x[:, 3:]], 1), y], 1) ** 2).sum(),
    "stack of rows": lambda x, y: (torch.stack(torch.cat([x, y], 1).unbind(1)) ** 2).sum() + torch.stack([x]).sum(),
    "chunk, reshape, cat": lambda x, y: (torch.cat([p.reshape(2, 4) for p in x.chunk(4, 1)]).cumsum(0) ** 2).sum(),
    "chunk, squeeze, cat": lambda x, y: (torch.cat([p.squeeze(0) for p in x.chunk(4)]).cumsum(0) ** 2).sum(),
    "backwards": lambda x, y: (torch.stack(x.unbind(1)[::-1]).cumsum(1) ** 2).sum(),
    "again and again": lambda x, y: (torch.cat([x[:2]] * 8).cumsum(0) ** 2).sum(),
    "cat and split": lambda x, y: sum((p ** 2).sum() for p in torch.cat([x.relu().view(16, 2), y]).split([16, 4])),
    "through tanh": lambda x, y: sum((p ** 2).sum() for p in torch.stack(x.chunk(2)).tanh().unbind()),
    "some rows": lambda x, y: (torch.stack([x[:, i] for i in (0, 1, 5, 2)]) ** 2).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_same(name):
    program = GRADIENTS[name]
    inputs = [torch.randn(4, 8, requires_grad=True), torch.randn(4, 2, requires_grad=True)]
    gm, given = capture_torch(program, inputs)
    before = copy.deepcopy(gm)
    after = triptych.pre_grad_passes(gm, (), "fuse_split_getitem_squeeze_cat")
    assert [n.target for n in after.graph.nodes] != [n.target for n in before.graph.nodes]
    given = [g.detach().requires_grad_() for g in given]
    expected = torch.autograd.grad(before(*given)[0], given, allow_unused=True)
    for want, got in zip(expected, torch.autograd.grad(after(*given)[0], given, allow_unused=True), strict=True):
        torch.testing.assert_close(got, want)  # sums may be taken in another order


def many_pieces(count):
    """Splits and cats in all the ways that invite a second look at every piece."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def pieces(value, sizes):
        split = graph.call_function(torch.split, (value, sizes))
        return [graph.call_function(getitem, (split, i)) for i in range(count)]

    rows = pieces(x, 1)
    joined = [graph.call_function(torch.cat, ([y, *rows, y],)), graph.call_function(torch.stack, (rows[::2],))]
    joined += [graph.call_function(torch.cat, (pair,)) for pair in zip(rows, rows[1:])]
    nest = y
    for row in rows:
        nest = graph.call_function(torch.cat, ([nest, row],))
    again = pieces(graph.call_function(torch.cat, ([graph.call_function(torch.relu, (r,)) for r in rows],)), 1)
    graph.output((*[graph.call_function(torch.relu, (j,)) for j in (*joined, *again)], nest))
    return GraphModule(torch.nn.Module(), graph), [torch.randn(count, 2), torch.randn(1, 2)]


def work(count):
    gm, inputs = many_pieces(count)
    Program(gm, inputs)  # leaves the facts on the nodes
    with counting_passes() as lines:
        triptych.pre_grad_passes(gm, inputs)
    return lines


@pytest.mark.slow  # nested cats and splits are in test_linear_work.py too
def test_work_is_linear():
    work(2)  # tables that are read once
    assert not grows(work(60), work(120))


@pytest.mark.parametrize(
    "program",
    [
        lambda a, b: [p * 2 for p in torch.cat([a, b], 1).chunk(2, 1)],
        lambda a, b: [p * 2 for p in torch.stack([a, b]).unbind()],
        lambda a, b: [torch.cat([a, b])[3:] * 2],
    ],
)
def test_piece_of_a_joined_tensor_asks_for_its_gradient(program):
    given = [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)]
    for result in torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})(*given):
        assert result.requires_grad


def test_a_view_that_only_fake_tensors_allow_is_a_copy():
    """A slice of shape (2, 1, 4) whose rows lie apart is no (1, 8), whatever torch's fake tensors say."""
    traced = make_fx(lambda x: x[:, 1:2] * 2, tracing_mode="fake")(torch.randn(2, 3, 4))
    (piece,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)[-1:]
    (after,) = piece.users
    made = Rewriter(Program(traced)).emitter(after).reshape(piece, [1, 8])
    traced.graph.output_node().args = (made.node,)
    traced.recompile()
    x = torch.randn(2, 3, 4)
    assert torch.equal(traced(x), x[:, 1].reshape(1, 8))
