"""The rewriter: what it refuses, what it leaves behind, and how it takes a rewrite back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from triptych import Rule
from triptych.errors import RuleError
from triptych.ir.program import Program
from triptych.ir.text import text
from triptych.rewrite.driver import run_rules
from triptych.rewrite.rewriter import Rewriter
from triptych.testing.capture import capture, capture_torch
from triptych.testing.check import compare_graphs

pytestmark = pytest.mark.fast

X, Y = torch.randn(4, 6), torch.randn(4, 6)


class DropClone(Rule):
    """clone(x) -> x"""

    without_facts = True

    def pattern(self, op, x):
        return op.clone(x)

    def rewrite(self, op, x):
        return x


class NegNeg(Rule):
    """neg(neg(x)) -> x"""

    def pattern(self, op, x):
        return op.neg(op.neg(x))

    def rewrite(self, op, x):
        return op.mul(op.mul(x, -1), -1)


def apply(rule, program, *inputs, dialect="torch", **how):
    gm, args = capture(program, inputs, dialect)
    before = copy.deepcopy(gm)
    tally = run_rules(Rewriter(Program(gm), "test"), [rule], **how)
    gm.graph.lint()
    gm.recompile()
    compare_graphs(before, gm, args)
    return gm, tally


def reasons(tally):
    return [d.reason for d in tally.declines.values()]


REFUSED = {
    "written after": (lambda x: (c := x.clone(), c.add_(1), c * 2)[2], "written"),
    "source written after": (lambda x: (c := x.clone(), x.add_(1), c * 2)[2], "written"),
    "written through a view": (lambda x: (c := x.clone(), c[0].zero_(), c * 2)[2], "written"),
    "returned": (lambda x: x.clone(), "leaves the graph"),
    "returned as a view": (lambda x: x.clone().view(-1), "leaves the graph"),
    "two results would be one": (lambda x: (y := x.relu(), y.clone())[0:2], "leaves the graph"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_somebody_would_notice(case):
    program, reason = REFUSED[case]
    _, tally = apply(DropClone(), program, X)
    assert not tally.fired and reason in reasons(tally)[0]


@pytest.mark.parametrize("program", [lambda x: x.clone() + 1, lambda x: x.relu().clone(), lambda x: x.clone().view(-1) * 2])
@pytest.mark.parametrize("dialect", ["torch", "aten"])
def test_a_copy_nobody_notices_goes(program, dialect):
    gm, tally = apply(DropClone(), program, X, dialect=dialect)
    assert tally.fired["drop_clone"] == 1 and "clone" not in text(gm).replace("drop_clone", "")


def test_one_new_tensor_for_another_may_be_written_later():
    _, tally = apply(NegNeg(), lambda x: (y := x.neg().neg(), y.add_(1), y[0])[0:3], X)
    assert tally.fired["neg_neg"] == 1


def test_writes_between_the_matched_nodes():
    _, tally = apply(NegNeg(), lambda x: (y := x.neg(), x.add_(1), y.neg())[2], X)
    assert not tally.fired and "writes a matched value in between" in reasons(tally)[0]
    _, tally = apply(NegNeg(), lambda x: (y := x.neg(), y.neg(), x.add_(1))[1], X)
    assert tally.fired["neg_neg"] == 1


def test_other_strides_are_refused_where_they_show():
    class Restride(Rule):
        """t(x) -> contiguous(t(x))"""

        interior_may_be_used = True

        def pattern(self, op, x):
            return op.relu(op.permute(x, [1, 0]))

        def rewrite(self, op, x):
            return op.relu(op.clone(op.permute(x, [1, 0]), memory_format=torch.contiguous_format))

    _, tally = apply(Restride(), lambda x: torch.relu(x.t()), X)
    assert not tally.fired and "stride" in reasons(tally)[0]
    _, tally = apply(Restride(), lambda x: torch.relu(x.t()) @ x, X, dialect="aten")
    assert tally.fired


def test_a_rule_for_no_gradient_is_refused_where_one_is_wanted():
    class ReluAsClamp(Rule):
        """relu(x) -> clamp(x, min=0), whose gradient at 0 is 1"""

        without_gradient = True

        def pattern(self, op, x):
            return op.relu(x)

        def rewrite(self, op, x):
            return op.clamp(x, min=0)

    _, tally = apply(ReluAsClamp(), lambda x: x.relu() + 1, X)
    assert tally.fired
    _, tally = apply(ReluAsClamp(), lambda x: x.relu() + 1, X.clone().requires_grad_())
    assert not tally.fired and "gradient" in reasons(tally)[0]


def test_the_very_operand_may_stand_for_what_returns_it():
    """Nothing is known of the values there, and the first is returned: it is x, before and after."""

    class Drop(Rule):
        """dropout(x, 0), relu(x) -> x"""

        def pattern(self, op, x, p, train):
            return op.dropout(x, p, train) | op.relu(x)

        def rewrite(self, op, x):
            return x

    fired, kept = (symbolic_trace(f) for f in (lambda x: F.dropout(x, 0.0, True), lambda x: F.dropout(x, 0.5, True)))
    assert run_rules(Rewriter(Program(fired), "test"), [Drop()]).fired
    assert not run_rules(Rewriter(Program(kept), "test"), [Drop()]).fired
    assert not run_rules(Rewriter(Program(symbolic_trace(lambda x: x.relu())), "test"), [Drop()]).fired


@pytest.mark.parametrize("rewrite, reason", [
    (lambda self, op, x: op.to(op.relu(x), dtype=torch.float64), "dtype"),
    (lambda self, op, x: op.sum(op.relu(x), dim=[0]), "shape"),
    (lambda self, op, x: 3, "values of the graph"),
])  # fmt: skip
def test_a_replacement_must_be_alike(rewrite, reason):
    rule = type("Bad", (Rule,), {"pattern": lambda self, op, x: op.relu(x), "rewrite": rewrite})()
    gm, tally = apply(rule, lambda x: x.relu() + 1, X)
    assert not tally.fired and reason in reasons(tally)[0]
    assert len(gm.graph.nodes) == 4  # nothing of the attempt is left


class Raises(Rule):
    """relu(x) -> an error half-way"""

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, op, x):
        op.neg(op.neg(x))
        raise ZeroDivisionError("oops")


def test_a_rule_that_raises_costs_that_rewrite_only():
    gm, tally = apply(Raises(), lambda x: x.relu() + 1, X)
    assert not tally.fired and "ZeroDivisionError" in str(tally.failures.popitem()[1]) and len(gm.graph.nodes) == 4
    with pytest.raises(RuleError, match="raises.*oops(?s:.*)test_rewrite.py"):
        apply(Raises(), lambda x: x.relu() + 1, X, strict=True)


def test_random_draws_and_regions_are_not_crossed():
    class DropoutTwice(Rule):
        """dropout(x) -> x"""

        def pattern(self, op, x, p):
            return op.dropout(x, p, True)

        def rewrite(self, op, x):
            return x

    _, tally = apply(DropoutTwice(), lambda x: F.dropout(x, 0.5) + 1, X)
    assert not tally.fired and "random" in reasons(tally)[0]

    def regions(x):
        y = x.neg()
        with torch.no_grad():
            z = y.neg()
        return z + 1

    _, tally = apply(NegNeg(), regions, X)
    assert not tally.fired and "stands between" in reasons(tally)[0]


def test_autocast_is_kept_for_new_nodes():
    class Twice(Rule):
        """matmul(x, w) -> matmul(x, w), written anew"""

        def pattern(self, op, x, w):
            return op.relu(op.matmul(x, w))

        def rewrite(self, op, x, w):
            return op.clamp(op.matmul(x, w), min=0)

    def program(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.relu(x @ w)

    gm, _ = capture_torch(program, [X, Y.t()])
    tally = run_rules(Rewriter(Program(gm), "test"), [Twice()])
    assert tally.fired["twice"] == 1
    assert "matmul_1: bf16" in text(gm)


def test_provenance_and_source_line_are_kept():
    gm, _ = apply(NegNeg(), lambda x: x.neg().neg() + 1, X)
    (new, _) = [line for line in text(gm).splitlines() if "<- neg_neg" in line]
    assert "# test_rewrite.py:" in new


def test_opposite_rules_stop_with_a_reason():
    class There(Rule):
        """relu(x) -> clamp(x, 0)"""

        def pattern(self, op, x):
            return op.relu(x)

        def rewrite(self, op, x):
            return op.clamp(x, min=0)

    class Back(Rule):
        """clamp(x, 0) -> relu(x)"""

        def pattern(self, op, x):
            return op.clamp(x, min=0)

        def rewrite(self, op, x):
            return op.relu(x)

    gm, _ = capture_torch(lambda x: x.relu() + 1, [X])
    tally = run_rules(Rewriter(Program(gm), "test"), [There(), Back()])
    assert "limit" in tally.stop and "again and again" in tally.stop
    assert set(tally.endless) == {"there", "back"}


def test_a_run_without_end_names_only_the_rule_that_rewrites_its_own_result():
    class Endless(Rule):
        """x * y -> (x * y) * 1"""

        def pattern(self, op, x, y):
            return op.mul(x, y)

        def rewrite(self, op, x, y):
            return op.mul(op.mul(x, y), 1)

    gm, _ = capture_torch(lambda x: (x * 2).clone() + x.clone(), [X])
    tally = run_rules(Rewriter(Program(gm), "test"), [Endless(), DropClone()])
    assert tally.fired["drop_clone"] == 2
    assert tally.endless == ("endless",)
    assert tally.stop.startswith("limit of ") and "endless rewrites its own result again and again" in tally.stop


def test_a_limit_on_rewrites():
    gm, _ = capture_torch(lambda x: x.clone() + x.clone() + x.clone(), [X])
    tally = run_rules(Rewriter(Program(gm), "test", limit=2), [DropClone()])
    assert tally.fired.total() == 2 and tally.stop == "limit of rewrites"


def test_without_facts_only_rules_that_need_none():
    gm = symbolic_trace(lambda x: x.clone().neg().neg() + 1)
    tally = run_rules(Rewriter(Program(gm), "test"), [DropClone(), NegNeg()])
    assert tally.fired == {"drop_clone": 1} and "not known" in reasons(tally)[0]


def test_symbolic_sizes_reach_new_nodes():
    class Flat(Rule):
        """relu(x) -> relu of x flattened, and back"""

        def pattern(self, op, x):
            return op.relu(x)

        def check(self, m, x):
            m.require(x.rank == 2, "not a matrix")

        def rewrite(self, op, x):
            return op.reshape(op.clamp(op.reshape(x, [-1]), min=0), list(x.shape))

    for dialect in ("torch", "aten"):
        gm, args = capture(lambda x: x.relu() + 1, [X], dialect, dynamic=True)
        tally = run_rules(Rewriter(Program(gm), "test"), [Flat()])
        gm.recompile()
        assert tally.fired["flat"] == 1
        out = gm(*args)
        torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, X.relu() + 1)
