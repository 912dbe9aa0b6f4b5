"""Strides of size-1 dims: pointwise operations order the dims of their result by them.

A view that only moves dims of size 1 reads the same memory, and yet dropping it may change the strides of what is
computed from it.
"""

from __future__ import annotations

import pytest
import torch

import triptych
from triptych.pre_grad.remove_noop_pass import RemoveNoopPass
from triptych.rules.noop_views import NoopPermute
from triptych.testing.capture import capture_torch
from triptych.testing.check import run_pass

PROGRAMS = {
    "of channels": (lambda m, c: m * c[:, :, None, None].permute(2, 1, 0, 3), (2, 4, 1, 5), (1, 4)),
    "order of other dims": (lambda a, b: a * b.permute(3, 1, 2, 0), (1, 1, 3, 1), (1, 2, 1, 1)),
    "by transposes": (lambda a, b: a + b.transpose(0, 3).transpose(2, 3), (2, 1, 3, 1), (1, 3, 1, 1)),
    "by movedim": (lambda a, b: a + b.movedim(0, -1), (1, 1, 3, 1), (1, 2, 1, 1)),
    "by squeeze and unsqueeze": (lambda a, b: a + b.squeeze(0).unsqueeze(-1), (1, 1, 3, 1), (1, 2, 1, 1)),
    "by views that undo each other": (lambda a, b: a + b.reshape(2).reshape(1, 2, 1, 1).permute(3, 1, 2, 0),
                                      (1, 1, 3, 1), (1, 2, 1, 1)),
    "behind other views": (lambda a, b: (a * b.permute(3, 1, 2, 0)[:, :, None]).relu(), (1, 1, 1, 3, 1), (1, 2, 1, 1)),
    "far behind": (lambda a, b: (a + (b.permute(3, 1, 2, 0).squeeze(0).unsqueeze(0)).clone()).sin() * 2,
                   (1, 1, 3, 1), (1, 2, 1, 1)),
    "in where": (lambda a, b: torch.where(a > 0, a, b.permute(3, 1, 2, 0)), (1, 1, 3, 1), (1, 2, 1, 1)),
    "in addcmul": (lambda a, b: torch.addcmul(a, a, b.permute(3, 1, 2, 0)), (1, 1, 3, 1), (1, 2, 1, 1)),
    "of an expanded result": (lambda a, b: (a * b.permute(3, 1, 2, 0)).expand(4, 2, 3, 5).contiguous(),
                              (1, 1, 3, 1), (1, 2, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_are_those_of_eager(name, train):
    program, *shapes = PROGRAMS[name]
    torch._dynamo.reset()
    given = [torch.randn(s).requires_grad_(train) for s in shapes]
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})
    want, got = program(*given), compiled(*given)
    for a, b in zip(*((x,) if torch.is_tensor(x) else x for x in (want, got))):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


def test_strides_of_the_value_itself():
    def program(x):
        return x.sin().permute(3, 1, 2, 0)

    torch._dynamo.reset()
    x = torch.randn(1, 2, 1, 1)
    compiled = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager"})
    assert compiled(x).stride() == program(x).stride() == (1, 1, 1, 2)


def after_noops(program, *shapes):
    gm, _ = capture_torch(program, [torch.randn(s) for s in shapes], False)
    tally = run_pass(RemoveNoopPass, gm)
    return gm, tally


def test_a_permute_whose_strides_nobody_sees_goes():
    """A product, a sum over the dims or a copy computes the same strides with it and without it."""
    _, tally = after_noops(lambda a, b: a * b.sin().permute(3, 1, 2, 0).sum((0, 2)), (2, 1), (1, 2, 1, 1))
    assert tally.fired["noop_permute"] == 1


def test_one_whose_strides_are_seen_stays_and_says_why():
    gm, tally = after_noops(lambda a, b: a * b.permute(3, 1, 2, 0), (1, 1, 3, 1), (1, 2, 1, 1))
    assert not tally.fired["noop_permute"]
    assert any("stride" in d.reason for d in tally.declines.values() if d.rule == NoopPermute().name), tally.declines


def test_facts_behind_a_dropped_permute_tell_the_new_strides():
    """Later rules go by the facts: they must be those of the graph as it is."""
    gm, tally = after_noops(lambda b: b.sin().permute(3, 1, 2, 0).unsqueeze(0).sum((0, 1)), (1, 2, 1, 1))
    assert tally.fired["noop_permute"] == 1
    (view,) = [n for n in gm.graph.nodes if "unsqueeze" in n.name]
    assert view.meta["example_value"].stride() == torch.empty(1, 2, 1, 1).unsqueeze(0).stride()
