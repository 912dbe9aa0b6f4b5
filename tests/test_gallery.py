"""Every pass of the catalogue fires on an example of its own, and the result is eager's, gradients too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from triptych.passes.catalogue import list_passes
from triptych.pipeline import STAGES, Hook
from triptych.rewrite.passes import Pass
from triptych.rewrite.rule import Rule
from triptych.testing import declines, fires
from triptych.testing.check import compare_gradients, gradients, run_example
from triptych.testing.gallery import CLOSE, DIFFERS, EQUAL, NOTHING, exhibit, gallery, one_line
from triptych.verify.tolerances import GRADIENT

PRE_GRAD = {entry.name: entry for entry in STAGES["pre_grad"] if not isinstance(entry, Hook)}

NO_GRADIENT = {"quant_lift_up", "apply_gumbel_max_trick", "fuse_conv_bn"}
"""What they are about has none: small integers, the index of a sample, weights that are promised to stay."""

ELSEWHERE = {"move_constructors_to_gpu"}
"""Needs a device that is not there everywhere; its own tests run it."""


@pytest.mark.parametrize("name", PRE_GRAD)
def test_a_pass_before_autograd_equals_eager_in_forward_and_gradient(name):
    shown = exhibit(PRE_GRAD[name], "pre_grad")
    assert shown.rewrites, f"{name} fires on none of its first examples"
    assert shown.forward in (EQUAL, CLOSE), shown
    assert shown.gradient == (NOTHING if name in NO_GRADIENT else EQUAL), shown


LATER = [(s, e) for s in STAGES if s != "pre_grad" for e in STAGES[s] if not isinstance(e, Hook)]


@pytest.mark.parametrize("stage, entry", [pytest.param(s, e, id=f"{s}-{e.name}") for s, e in LATER])
def test_a_later_pass_equals_eager(stage, entry):
    shown = exhibit(entry, stage)
    assert shown.good or entry.name in ELSEWHERE, shown


PARTS = [info for info in list_passes() if any(info.name in e.parts for _, e in LATER)]


@pytest.mark.parametrize("info", PARTS, ids=lambda info: info.name)
def test_a_part_of_a_pass_equals_eager(info):
    assert info.rules and all(rule.fires for rule in info.rules) and info.example
    (shown,) = gallery([info])
    assert shown.good, shown


# ---- a check that cannot fail checks nothing ----


class ReluAsClamp(Rule):
    """relu(x) -> clamp(x, 0), equal but for the gradient at 0"""

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, op, x):
        return op.clamp(x, min=0)

    examples = [fires(lambda x: torch.relu(x), torch.zeros(4)), declines(lambda x: x.exp(), "f32[4]")]


@dataclass(frozen=True)
class ReluAsClampPass(Pass):
    """Gives another gradient."""

    name = "relu_as_clamp_pass"

    def rules(self):
        return [ReluAsClamp()]


class ReluAsAbs(ReluAsClamp):
    """relu(x) -> abs(x), another value"""

    def rewrite(self, op, x):
        return op.abs(x)

    examples = [fires(lambda x: torch.relu(x), "f32[4]")]


@dataclass(frozen=True)
class ReluAsAbsPass(Pass):
    """Gives another value."""

    name = "relu_as_abs_pass"

    def rules(self):
        return [ReluAsAbs()]


def test_another_gradient_is_seen():
    example = ReluAsClamp.examples[0]
    with pytest.raises(AssertionError, match="gradients differ"):
        run_example(ReluAsClamp(), example, "torch")
    run_example(ReluAsClamp(), example, "aten")  # there autograd is done
    shown = exhibit(ReluAsClampPass, "pre_grad")
    assert (shown.forward, shown.gradient) == (EQUAL, DIFFERS) and not shown.good
    assert "gradients differ" in shown.problem


def test_another_value_is_seen():
    shown = exhibit(ReluAsAbsPass, "pre_grad")
    assert shown.forward == DIFFERS and "values differ" in shown.problem and not shown.good


def test_a_rule_may_say_that_it_is_for_no_gradient(monkeypatch):
    monkeypatch.setattr(ReluAsClamp, "without_gradient", True)
    run_example(ReluAsClamp(), ReluAsClamp.examples[0], "torch")


def write_a_piece(x: Any) -> Any:
    x.chunk(2)[0].add_(1)
    return x * 2


def test_gradients_of_what_is_written(capsys):
    x = torch.randn(4)
    assert gradients(write_a_piece, [x]) is None  # autograd forbids it
    assert not compare_gradients(write_a_piece, write_a_piece, [x])
    assert compare_gradients(lambda x: x.mul_(3) * 2, lambda x: x.mul_(3) + x, [x])
    with pytest.raises(AssertionError, match="gradients differ"):
        compare_gradients(lambda x: x.mul_(3) * 2, lambda x: x.mul_(2) * 3 + 0 * x.mul_(2), [x])
    assert gradients(lambda x: x.argmax(), [x]) == [] and gradients(lambda i: i + 1, [torch.arange(3)]) == []
    with pytest.raises(AssertionError, match="forbids"):
        compare_gradients(lambda x: x * 2, write_a_piece, [x])


def test_what_cancels_is_measured_by_what_it_is_made_of():
    x = torch.tensor([1000.0, 1.0])
    assert compare_gradients(lambda x: x * 1000, lambda x: x * 1000.0001, [x])
    with pytest.raises(AssertionError):
        compare_gradients(lambda x: x * 1000, lambda x: x * 1001, [x])
    assert set(GRADIENT) >= {torch.float16, torch.bfloat16, torch.float64}


def several_lines(x):
    """Not part of what it computes."""
    y = x + 1
    return y.relu(), [
        y,
    ]


def test_programs_on_one_line():
    import inspect

    assert one_line("lambda x: (x +\n  1)") == "x + 1"
    assert one_line(inspect.getsource(several_lines)) == "y = x + 1; return (y.relu(), [y])"
    assert one_line("Sequential(\n  (0): ReLU()\n)") == "Sequential( (0): ReLU() )"
