"""What examples cannot show of `remove_noop_pass` and `remove_noop_ops`: graphs without facts, and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from triptych.ir.program import Program
from triptych.joint.remove_noop_ops import RemoveNoopOps
from triptych.pre_grad.remove_noop_pass import RemoveNoopPass
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture_torch
from triptych.testing.check import compare_graphs


def run(pass_, gm, inputs=()):
    tally = pass_.run(Rewriter(Program(gm, inputs), pass_.name), strict=True)
    gm.graph.lint()
    gm.recompile()
    return tally


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op.startswith("call")]


def clone_then_add(x):
    y = x.clone()
    return y + 1


def test_clone_without_any_facts():
    gm = torch.fx.symbolic_trace(clone_then_add)
    tally = run(RemoveNoopOps(), gm)
    assert tally.fired == {"noop_clone": 1}
    assert "clone" not in targets(gm)
    assert torch.equal(gm(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "program, reason",
    [
        (lambda x: x.clone(), "strides"),
        (lambda x: x.clone().add_(1), "written"),
        (lambda x: x.clone().view(-1) + 1, "strides"),
        (lambda x: x.clone(memory_format=torch.channels_last) + 1, "strides"),
    ],
    ids=["returned", "written", "viewed", "another format"],
)
def test_clone_that_shows_stays_without_facts(program, reason):
    gm = torch.fx.symbolic_trace(program)
    tally = run(RemoveNoopOps(), gm)
    assert "clone" in targets(gm)
    assert any(reason in d.reason for d in tally.declines.values())


def copy_seen_through_a_view(x):
    """`whole` becomes x, and with it `flat` a view of x: not what may be returned as a tensor of its own."""
    whole = torch.cat([x])
    flat = whole.reshape(-1)
    return flat.relu(), flat * 1


def copy_returned_beside_its_source(x):
    stacked = torch.stack([x])
    whole = torch.cat([stacked])
    return whole - 0, whole.to(torch.float32), whole.unsqueeze(-1)


@pytest.mark.parametrize("program", [copy_seen_through_a_view, copy_returned_beside_its_source])
def test_facts_that_tell_of_replaced_memory(program):
    """A view keeps the fact computed on its first operand; that it shares memory must be known of the second too."""
    x = torch.randn(1, 4)
    gm = torch.fx.symbolic_trace(program)
    before = copy.deepcopy(gm)
    for _ in range(2):  # the second time with all that is known asked anew
        run(RemoveNoopPass(), gm, [x])
    compare_graphs(before, gm, [x])


def test_modules_without_any_facts():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
    gm = torch.fx.symbolic_trace(model)
    tally = run(RemoveNoopPass(), gm)
    assert tally.fired == {"noop_identity": 1, "noop_dropout": 1}
    assert targets(gm) == ["0", "3"]


def test_a_module_with_a_hook_stays():
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    gm = torch.fx.symbolic_trace(model)
    assert not run(RemoveNoopPass(), gm).fired


def gradients(gm, inputs):
    inputs = [i.detach().clone().requires_grad_() for i in inputs]
    (result,) = gm(*inputs)
    result.sum().backward()
    return [i.grad for i in inputs]


def all_sorts(x):
    y = (x * 1 - 0).view(4, 8).clone() ** 1
    with torch.no_grad():
        z = y * 1
    return (-(-y)).relu().relu() * z + z.expand(4, 8).detach()


def test_gradients_are_the_same():
    x = torch.randn(4, 8, requires_grad=True)
    gm, _ = capture_torch(all_sorts, [x])
    before = gradients(gm, [x])
    tally = run(RemoveNoopPass(), gm)
    assert tally.fired.total() >= 6, tally
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(gm, [x]), strict=True))
