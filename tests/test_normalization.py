"""The normalising passes: modules, graphs without facts, the random stream, and a second run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from triptych.ir.program import Program
from triptych.pre_grad.normalization_pass_aten import NormalizationPassAten
from triptych.pre_grad.normalize_node_kwargs_pass import NormalizeNodeKwargsPass
from triptych.rewrite.examples import make_inputs
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture
from triptych.testing.check import compare_graphs

BOTH = (NormalizationPassAten, NormalizeNodeKwargsPass)


def normalize(gm, example_inputs=(), passes=BOTH):
    program = Program(gm, example_inputs)
    tallies = [pass_().run(Rewriter(program, pass_.name), strict=True) for pass_ in passes]
    gm.graph.lint()
    gm.recompile()
    return tallies


def normalized(module, *inputs, facts=True, train=False):
    """The traced module and its normalised self, compared; what is left to look at is the graph."""
    gm = torch.fx.symbolic_trace(module.train(train))
    before = copy.deepcopy(gm)
    tally = normalize(gm, inputs if facts else ())[0]
    compare_graphs(before, gm, inputs)
    return gm, tally


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]


MODULES = [
    (nn.Linear(8, 4), F.linear),
    (nn.Linear(8, 4, bias=False), F.linear),
    (nn.Conv1d(4, 2, 3, padding=1), torch.conv1d),
    (nn.Conv1d(4, 2, 3, padding="same"), torch.conv1d),
    (nn.ConvTranspose1d(4, 2, 3, stride=2), torch.conv_transpose1d),
    (nn.ReLU(), F.relu),
    (nn.ReLU(inplace=True), "relu_"),
    (nn.GELU(approximate="tanh"), F.gelu),
    (nn.SiLU(), F.silu),
    (nn.Sigmoid(), torch.sigmoid),
    (nn.LeakyReLU(0.2), F.leaky_relu),
    (nn.PReLU(), torch.prelu),
    (nn.Softmax(-1), F.softmax),
    (nn.LayerNorm(8), F.layer_norm),
    (nn.BatchNorm1d(4), F.batch_norm),
    (nn.Dropout(0.5), F.dropout),
    (nn.Flatten(), torch.reshape),
    (nn.Unflatten(1, (2, 2)), torch.reshape),
]


@pytest.mark.parametrize("module, function", MODULES, ids=[type(m).__name__ for m, _ in MODULES])
def test_a_module_becomes_its_function(module, function):
    gm, _ = normalized(nn.Sequential(module), torch.randn(2, 4, 8))
    assert targets(gm) == [function]


def test_modules_without_facts():
    """Nothing is known of the values: what a module is can still be said, what a method belongs to cannot."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5), nn.Dropout())
    gm, tally = normalized(model, torch.randn(2, 3, 8, 8), facts=False)
    assert targets(gm) == [torch.conv2d, F.relu, "flatten", F.linear, F.dropout]
    assert [d.reason for d in tally.declines.values()] == ["shape and dtype are not known"]


def test_a_module_called_twice_shares_its_weight():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.fc(x))

    gm, _ = normalized(Twice(), torch.randn(2, 4))
    assert [n.target for n in gm.graph.find_nodes(op="get_attr")] == ["fc.weight", "fc.bias"]


class Odd(nn.Linear):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    "module, reason",
    [
        (nn.BatchNorm1d(4).train(), "statistics"),
        (nn.Conv1d(4, 2, 3, padding=1, padding_mode="circular"), "not a single call"),
        (nn.LSTM(8, 8), "not a single call"),
        (nn.Linear(8, 4), "hooks"),
        (Odd(8, 4), None),
        (nn.Identity(), None),
    ],
    ids=["training", "two calls", "many calls", "hook", "subclass", "identity"],
)
def test_a_module_that_is_no_function_stays(module, reason):
    if reason == "hooks":
        module.register_forward_hook(lambda module, args, out: out + 1)
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda m, name: not isinstance(m, nn.Sequential)  # type: ignore[method-assign]
    model = nn.Sequential(module)
    gm = torch.fx.GraphModule(model, tracer.trace(model))
    before = copy.deepcopy(gm)
    inputs = [torch.randn(2, 4, 8)]
    tally = normalize(gm, inputs)[0]
    compare_graphs(before, gm, inputs)
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    assert [reason in d.reason for d in tally.declines.values()] == ([True] if reason else [])


def test_dropout_draws_the_same_numbers():
    gm, _ = normalized(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(4, 8), train=True)
    assert targets(gm) == [F.dropout, F.linear]


def test_exported_conv_with_a_random_weight():
    """The stream of random numbers is the user's: the draw stays where it is, and is the same."""
    inputs = [torch.randn(1, 1, 8, 8)]
    program = torch._dynamo.export(lambda x: F.conv2d(x, torch.randn(1, 1, 3, 3), None, 1))
    gm, _ = program(*inputs)
    before = copy.deepcopy(gm)
    state = torch.get_rng_state()
    normalize(gm, inputs)
    assert torch.equal(state, torch.get_rng_state()), "normalising must not draw"
    compare_graphs(before, gm, inputs)
    _, randn, conv, _ = gm.graph.nodes
    assert (randn.target, randn.args) == (torch.randn, ([1, 1, 3, 3],))
    assert (conv.target, conv.args[1:], conv.kwargs) == (torch.conv2d, (randn,), {})


def test_operands_given_as_a_tuple_are_listed():
    class Halves(nn.Module):
        def forward(self, x):
            return torch.cat(x.chunk(2, 1))

    gm, _ = normalized(Halves(), torch.randn(2, 8))
    *_, cat, _ = gm.graph.nodes
    assert [n.target for n in gm.graph.nodes][1] is torch.split and len(cat.args[0]) == 2


def test_a_subclass_of_tensor_is_left_alone():
    sparse = torch.eye(3).to_sparse()
    gm = torch.fx.symbolic_trace(_Product())
    normalize(gm, [sparse, torch.randn(3, 3)])
    assert targets(gm) == [torch.mm]


class _Product(nn.Module):
    def forward(self, x, y):
        return torch.mm(x, y)


@pytest.mark.parametrize("pass_", BOTH)
def test_a_second_run_changes_nothing(pass_):
    for example in pass_.examples:
        gm, _ = capture(example.program, make_inputs(example), example.dialects[0], example.dynamic)
        normalize(gm, passes=[pass_])
        (again,) = normalize(gm, passes=[pass_])
        assert not again.fired, f"{example.source}: {dict(again.fired)}"
