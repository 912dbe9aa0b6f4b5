"""The numeric check: a pass that changes what a graph computes is undone, one that does not is left alone."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triptych
from tests.models import build
from tests.test_passes import names_of_the_real_pipeline, with_pass  # noqa: F401
from triptych.options import Options
from triptych.passes.manager import run_stage
from triptych.passes.session import Session, watching
from triptych.rewrite.passes import Pass
from triptych.rewrite.rule import Rule
from triptych.verify import numerics

aten = torch.ops.aten
LEVELS = ("final", "each")
X = torch.randn(4, 6)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))), x.sum()


def drop_relu(graph):
    for node in list(graph.nodes):
        if node.target in (torch.relu, F.relu, aten.relu.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def detach_relu(graph):
    for node in list(graph.nodes):
        if node.target in (torch.relu, F.relu):
            with graph.inserting_after(node):
                cut = graph.call_method("detach", (node,))
            node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def slightly_off(graph):
    for node in list(graph.nodes):
        if node.target in (torch.relu, F.relu, aten.relu.default):
            with graph.inserting_after(node):
                off = graph.call_function(aten.mul.Tensor, (node, 1.00001))
            off.meta = dict(node.meta)
            node.replace_all_uses_with(off, delete_user_cb=lambda user, off=off: user is not off)


def compiled(model, level, **options):
    torch._dynamo.reset()
    given = {"codegen": "eager", "verify": level, "on_error": "fallback", **options}
    return torch.compile(model, backend=triptych.compile_fx, options=given)


def undone(sessions):
    return [w for s in sessions for w in s.warnings if "was undone" in w]


def notes(sessions):
    return [w for s in sessions for w in s.warnings if "were not compared" in w]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", [drop_relu, detach_relu, slightly_off])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_wrong_pass_is_undone_in_training(level, wrong, dynamic):
    model = Small()
    with watching() as sessions:
        got = compiled(model, level, pre_grad_custom_pass=wrong)(X)
        gradients = torch.autograd.grad(got[0].sum(), list(model.parameters()))
    want = model(X)
    for a, b in zip((*got, *gradients), (*want, *torch.autograd.grad(want[0].sum(), list(model.parameters())))):
        torch.testing.assert_close(a, b)
    (message,) = undone(sessions)
    assert "pre_grad_custom_pass" in message
    assert ("gradient of l_" if wrong is detach_relu else "output 0") in message, message
    assert "is gone" in message if wrong is detach_relu else "differs" in message
    if level == "each":
        (record,) = [r for r in sessions[0].records if r.name == "pre_grad_custom_pass"]
        assert "undone" in record.error and not record.changed


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass"])
@pytest.mark.parametrize("wrong", [drop_relu, slightly_off])
def test_a_wrong_pass_is_undone_in_every_stage(level, hook, wrong):
    model = Small()
    with torch.no_grad(), watching() as sessions:
        for got, want in zip(compiled(model, level, **{hook: wrong})(X), model(X)):
            torch.testing.assert_close(got, want)
    (message,) = undone(sessions)
    assert hook in message and "output 0" in message and "differs" in message


def test_a_wrong_backward_graph_is_undone():
    def halve(graph, is_inference):
        for node in list(graph.nodes):
            if node.target is aten.mm.default and any("tangent" in n.name for n in graph.nodes):
                with graph.inserting_after(node):
                    off = graph.call_function(aten.mul.Tensor, (node, 0.5))
                off.meta = dict(node.meta)
                node.replace_all_uses_with(off, delete_user_cb=lambda user, off=off: user is not off)

    model = Small()
    with watching() as sessions:
        compiled(model, "each", post_grad_custom_pre_pass=halve)(X)[0].sum().backward()
    assert "post_grad_custom_pre_pass" in undone(sessions)[0]
    torch.testing.assert_close(model.second.bias.grad, torch.full((3,), 4.0))


class ReluIsIdentity(Rule):
    """relu(x) -> x * 1"""

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, op, x):
        return op.mul(x, 1)


class ReluOfDetached(Rule):
    """relu(x) -> relu(detach(x)), the gradient is lost"""

    def pattern(self, op, x):
        return op.relu(op.mul(x, 2))

    def rewrite(self, op, x):
        # with a path to x, which the rewriter insists on: that its gradient is wrong, only numbers tell
        return op.add(op.relu(op.mul(op.detach(x), 2)), op.sub(x, x))


class SquareByHand(Rule):
    """pow(x, 2) -> x * x"""

    def pattern(self, op, x):
        return op.pow(x, 2)

    def rewrite(self, op, x):
        return op.mul(x, x)


@dataclass(frozen=True)
class WrongValue(Pass):
    """Wrong."""

    name = "wrong_value"

    def rules(self):
        return [ReluIsIdentity()]


@dataclass(frozen=True)
class WrongGradient(Pass):
    """Wrong in its gradient only."""

    name = "wrong_gradient"

    def rules(self):
        return [ReluOfDetached()]


@dataclass(frozen=True)
class Right(Pass):
    """Right."""

    name = "right"

    def rules(self):
        return [SquareByHand()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", [WrongValue, WrongGradient])
def test_a_wrong_rule_is_undone_and_the_right_ones_stay(monkeypatch, level, wrong):
    with_pass(monkeypatch, "pre_grad", Right, wrong)
    x = torch.randn(4, 6, requires_grad=True)

    def model(x):
        return torch.relu(x.pow(2) * 2) + torch.relu(x)

    with watching() as sessions:
        got = compiled(model, level)(x)
    torch.testing.assert_close(got, model(x))
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, model(x))))
    (message,) = undone(sessions)
    assert wrong.name in message and ("gradient" if wrong is WrongGradient else "output 0") in message
    if level == "each":
        assert {r.name: r.rewrites for r in sessions[0].records if r.stage == "pre_grad"} == {"right": 1, wrong.name: 0}


@pytest.mark.parametrize("level", LEVELS)
def test_a_write_that_is_lost_or_new(level):
    def lose(graph):
        for node in list(graph.nodes):
            if node.target in ("add_", "mul_") and not node.users:
                graph.erase_node(node)

    def add(graph):
        for node in list(graph.nodes):
            if node.target in (operator.add, torch.add):
                with graph.inserting_after(node):
                    graph.call_method("mul_", (node.args[0], 2))

    def writes(x, y):
        x.mul_(2)
        return y.relu() * 2

    def pure(x, y):
        return x + y

    for wrong, function, word in ((lose, writes, "input l_x_"), (add, pure, "l_x_")):
        x, y = torch.randn(3), torch.randn(3)
        with torch.no_grad(), watching() as sessions:
            inputs = [x.clone(), y.clone()]
            compiled(function, level, pre_grad_custom_pass=wrong)(*inputs)
        wanted = [x.clone(), y.clone()]
        function(*wanted)
        torch.testing.assert_close(inputs, wanted)
        (message,) = undone(sessions)
        assert word.lower() in message.lower()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["mlp", "conv_batchnorm", "lstm_cell", "encoder"])
def test_right_passes_pass(name, train):
    case = build(name)
    model = case.model.train(train)
    with torch.set_grad_enabled(train), watching() as sessions:
        result = compiled(model, "each", add_passes="efficient_conv_bn_eval")(*case.call.args, **case.call.kwargs)
        if train:
            leaves = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            sum(t.sum() for t in leaves if t.requires_grad).backward()
    assert sessions and not undone(sessions), undone(sessions)
    assert not [n for n in notes(sessions) if "backward" not in n], notes(sessions)


def test_the_stage_of_a_frozen_model():
    case = build("conv_batchnorm")
    with torch.no_grad(), watching() as sessions:
        compiled(case.model.eval(), "each", freeze=True)(*case.call.args)
    assert any(r.rewrites for s in sessions for r in s.records if r.name == "fuse_conv_bn")
    assert not undone(sessions) and not notes(sessions)


def in_stage(gm, inputs=(), stage="pre_grad", **options):
    session = Session(Options.make({"verify": "each", "on_error": "fallback", **options}))
    run_stage(stage, gm, session, graph="test", example_inputs=inputs)
    return session


def index(x, table):
    return torch.relu(table[x]) * 2


def test_a_graph_that_cannot_be_run_is_not_held_against_its_passes():
    """Made-up integers are out of range here; with the user's own they are not."""
    table, x = torch.randn(1, 4), torch.zeros(3, dtype=torch.int64)
    session = in_stage(capture(index, x, table), pre_grad_custom_pass=drop_relu)
    (note,) = notes([session])
    assert "cannot be run" in note and "IndexError" in note and not undone([session])
    session = in_stage(capture(index, x, table), [table, x], pre_grad_custom_pass=drop_relu)
    assert undone([session])


def capture(function, *inputs):
    from triptych.testing.capture import capture_torch

    gm, _ = capture_torch(function, inputs)
    for node in gm.graph.nodes:
        node.meta.pop("grapharg", None)
    return gm


def test_a_large_graph_is_not_run(monkeypatch):
    monkeypatch.setattr(numerics, "LIMIT", 50)
    session = in_stage(capture(lambda x: x.relu() * 2, X), pre_grad_custom_pass=drop_relu)
    (note,) = notes([session])
    assert "more than is run" in note and not undone([session])


def test_random_draws():
    torch.manual_seed(0)  # not all numbers that a relu changes are dropped

    def dropout(x):
        return F.dropout(torch.relu(x), 0.5) * 2

    with torch.no_grad(), watching() as sessions:
        compiled(dropout, "each", pre_grad_custom_pass=drop_relu)(X)
    assert undone(sessions)  # the same seed, so the numbers can be compared

    def draws_twice(graph):
        for node in list(graph.nodes):
            if "dropout" in str(node.target):
                with graph.inserting_after(node):
                    again = graph.call_function(F.dropout, (node, 0.5))
                node.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)

    with torch.no_grad(), watching() as sessions:
        compiled(dropout, "each", pre_grad_custom_pass=[draws_twice, drop_relu])(X)
    assert any("random numbers" in n for n in notes(sessions))
    assert undone(sessions)  # the second is held against the graph the first has left


def test_where_eager_has_no_gradient_the_forward_is_compared():
    def model(x):
        y = x.exp()
        z = y * y
        y.add_(1)  # the backward of exp and mul would need y as it was
        return torch.relu(z)

    gm = capture(model, X)
    x = X.clone().requires_grad_()
    session = in_stage(gm, [x], pre_grad_custom_pass=drop_relu)
    assert any("gradients were not compared: RuntimeError" in w for w in session.warnings) and not undone([session])
    session = in_stage(capture(model, X), [x], pre_grad_custom_pass=slightly_off)
    assert undone([session])


def test_nothing_is_left_behind():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5)).train()
    state = copy.deepcopy(model.state_dict())
    gm = torch.fx.symbolic_trace(model)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    session = in_stage(gm, [X], pre_grad_custom_pass=slightly_off)
    assert undone([session]), session.warnings
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    model = Small().to(dtype)
    with torch.no_grad(), watching() as sessions:
        compiled(model, "each", pre_grad_custom_pass=drop_relu)(X.to(dtype))
    assert len(undone(sessions)) == 1
    with torch.no_grad(), watching() as sessions:
        compiled(model, "each")(X.to(dtype))
    assert not undone(sessions) and not notes(sessions)


def test_autocast():
    model = Small()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), watching() as sessions:
        compiled(model, "each", pre_grad_custom_pass=drop_relu)(X)
    assert len(undone(sessions)) == 1 and not notes(sessions)


class OneScale(triptych.Rule):
    """x * 3 * 0.2 -> x * 0.6; up to rounding"""

    exact = False
    scale = 0.6

    def pattern(self, op, x):
        return op.mul(op.mul(x, 3.0), 0.2)

    def rewrite(self, op, x):
        return op.mul(x, self.scale)


class WrongScale(OneScale):
    """x * 3 * 0.2 -> x * 0.7, which is wrong"""

    scale = 0.7


@pytest.mark.parametrize("rule", [OneScale, WrongScale])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_that_comes_from_half_precision_is_no_more_exact_than_that(rule, dtype):
    """float64 shows the error of such a result, which is far above that of float32."""

    def program(x):
        return (x * 3.0 * 0.2).float()

    torch._dynamo.reset()
    options = {"codegen": "eager", "add_rules": [rule], "verify": "each", "on_error": "raise"}
    compiled = torch.compile(program, backend=triptych.compile_fx, options=options)
    x = torch.randn(64, 64).to(dtype)
    if rule is OneScale:
        assert not torch.equal(compiled(x), program(x))
    else:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="wrong_scale"):
            compiled(x)
