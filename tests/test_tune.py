"""The option `tune`: when both ways of a rewrite are timed, and what is said of it."""

from __future__ import annotations

import pytest
import torch

import triptych


def rule_with(before, after, times, asked, **how):
    class Doubled(triptych.Rule):
        """x + x -> 2 * x"""

        def pattern(self, op, x):
            return op.add(x, x)

        def check(self, m, x):
            def measure():
                asked.append(True)
                return times

            m.pays(before, after, measure=measure, **how)

        def rewrite(self, op, x):
            return op.mul(x, 2)

    return Doubled


def outcome(rule, **options):
    torch._dynamo.reset()
    explanation = triptych.explain(
        lambda x: x + x, torch.ones(4), options={"codegen": "eager", "add_rules": [rule], **options}
    )
    records = [r for r in explanation.passes if r.stage == "pre_grad" and (r.fired["doubled"] or r.declines)]
    (record,) = [r for r in records if r.fired["doubled"] or any(d.rule == "doubled" for d in r.declines)]
    told = [str(d) for d in record.decisions] or [d.reason for d in record.declines if d.rule == "doubled"]
    return bool(record.fired["doubled"]), told[0]


CLOSE, FAR = (10e-6, 8e-6), (10e-6, 2e-6)


@pytest.mark.parametrize(
    "modelled, tune, is_timed",
    [
        (CLOSE, "off", False), (CLOSE, "unsure", True), (CLOSE, "all", True),
        (FAR, "off", False), (FAR, "unsure", False), (FAR, "all", True),
    ],
)  # fmt: skip
def test_what_is_timed(modelled, tune, is_timed):
    asked = []
    fired, told = outcome(rule_with(*modelled, (3e-6, 9e-6), asked), tune=tune)
    assert bool(asked) == is_timed
    assert fired != is_timed  # timed, it loses
    assert told.endswith("measured" if is_timed else "modelled")


def test_the_model_stands_where_nothing_can_be_timed():
    asked = []
    fired, told = outcome(rule_with(*CLOSE, None, asked), tune="all")
    assert asked and fired and told == "8.0 us instead of 10.0 us, modelled"


def test_a_rule_may_say_that_the_model_knows_little():
    asked = []
    outcome(rule_with(*FAR, None, asked, error=100.0))
    assert asked


def test_a_sure_gain_is_not_timed():
    asked = []
    assert outcome(rule_with(*CLOSE, (1.0, 2.0), asked, sure=True))[0] and not asked


def test_a_wrong_value_is_said():
    with pytest.raises(triptych.TriptychError, match="tune"):
        triptych.explain(lambda x: x, torch.ones(1), options={"tune": "sometimes"})
