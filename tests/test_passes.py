"""How passes run: hooks, order, names, records, and what happens to a pass that goes wrong."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import dataclass

import pytest
import torch

import triptych
from triptych import Options, pipeline
from triptych.errors import RuleError, TriptychError, UnknownName
from triptych.passes.effects import EFFECT_OF_PASS
from triptych.passes.manager import run_stage
from triptych.passes.session import Session
from triptych.rewrite.edits import SoundByRule
from triptych.rewrite.passes import Pass
from triptych.rewrite.rule import Match, Rule
from triptych.testing.capture import capture_aten

pytestmark = pytest.mark.fast

X = torch.randn(4, 6)


def aten(program=lambda x: x.relu() + 1):
    return capture_aten(program, [X])[0]


def run(stage, gm, observed=True, **options):
    session = Session(Options.make(options), observed=observed)
    run_stage(stage, gm, session, graph="test", is_inference=True)
    return session


def relu_to_neg(graph):
    for node in graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.neg.default


HOOKS = {
    "pre_grad": ["pre_grad_custom_pass"],
    "joint": ["joint_custom_pre_pass", "joint_custom_post_pass"],
    "post_grad": ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"],
}


@pytest.mark.parametrize("stage, hook", [(s, h) for s, hooks in HOOKS.items() for h in hooks])
def test_hooks_take_a_callable_or_an_ordered_list(stage, hook):
    seen = []
    session = run(stage, aten(), **{hook: [lambda g: seen.append(1), lambda gm: seen.append(2)]})
    assert seen[:2] == [1, 2]
    assert [r.name for r in session.records].count(hook) == len(seen)

    gm = aten()
    session = run(stage, gm, **{hook: relu_to_neg})
    record = next(r for r in session.records if r.name == hook and r.changed)
    assert record.fired["relu_to_neg"] == 1 and "aten.neg" in record.after and "aten.relu" in record.before
    assert torch.equal(gm(X), -X + 1)


def test_hooks_are_told_what_they_ask_for():
    seen = {}

    def custom(gm: torch.fx.GraphModule, is_inference):
        seen.update(gm=gm, is_inference=is_inference)

    gm = aten()
    run("post_grad", gm, post_grad_custom_pre_pass=custom)
    assert seen["gm"] is gm and seen["is_inference"] is True


def test_a_user_pass_that_raises_is_undone(caplog):
    def half_done(graph):
        relu_to_neg(graph)
        raise ZeroDivisionError("oops")

    gm = aten()
    with caplog.at_level(logging.WARNING, "triptych"):
        session = run("joint", gm, joint_custom_post_pass=half_done, on_error="fallback")
    assert torch.equal(gm(X), X.relu() + 1)
    record = next(r for r in session.records if r.name == "joint_custom_post_pass")
    assert "ZeroDivisionError" in record.error and "half_done" in session.warnings[0] and "half_done" in caplog.text
    with pytest.raises(RuleError, match="half_done.*oops"):
        run("joint", aten(), joint_custom_post_pass=half_done, verify="each", on_error="fallback")


@pytest.mark.parametrize("hook", [hook for hooks in HOOKS.values() for hook in hooks])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_user_pass_that_raises_is_an_error_if_errors_are_wanted(hook, codegen):
    def half_done(graph):
        raise ZeroDivisionError("oops")

    with pytest.raises(Exception, match=f"RuleError: {hook}: half_done raised ZeroDivisionError: oops"):
        torch.compile(lambda x: x.sin() + 1, backend="triptych", options={hook: half_done, "codegen": codegen})(X)


def without_arguments(graph):
    next(node for node in graph.nodes if "sin" in str(node.target)).args = ()


def of_another_shape(graph):
    """The call runs, but one that reads its result does not."""
    sin = next(node for node in graph.nodes if "sin" in str(node.target))
    with graph.inserting_before(sin):
        sin.args = (graph.call_function(torch.ops.aten.view.default, (sin.args[0], [-1])),)


@pytest.mark.parametrize("hook", [hook for hooks in HOOKS.values() for hook in hooks])
@pytest.mark.parametrize("broken, call", [(without_arguments, "sin"), (of_another_shape, "mm|matmul")])
def test_a_user_pass_that_leaves_a_call_that_cannot_run_is_named(hook, broken, call, caplog):
    def program(x):
        return x.sin() @ torch.ones(x.shape[1], 2)

    options = {hook: broken, "codegen": "eager"}
    wanted = rf"{hook}: {broken.__name__} leaves an invalid graph: a call cannot run: \w*({call})"
    with pytest.raises(Exception, match=f"RuleError: {wanted}"):
        torch.compile(program, backend="triptych", options=options)(X)
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="triptych", options={**options, "on_error": "fallback"})
    assert torch.equal(compiled(X), program(X)) and re.search(wanted, caplog.text)


def test_a_user_pass_that_breaks_the_graph_is_undone():
    def malformed(graph):
        relu = list(graph.nodes)[1]
        relu.args = (torch.fx.Graph().placeholder("nowhere"),)

    gm = aten()
    session = run("joint", gm, joint_custom_post_pass=malformed, on_error="fallback")
    assert torch.equal(gm(X), X.relu() + 1) and session.warnings


def erase_output(graph):
    graph.erase_node(graph.output_node())


def return_nothing(graph):
    graph.output_node().args = ((),)


@pytest.mark.parametrize("broken", [erase_output, return_nothing])
@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "joint_custom_post_pass", "post_grad_custom_post_pass"])
def test_a_user_pass_that_drops_the_output_is_undone(hook, broken, caplog):
    options = {"codegen": "eager", "on_error": "fallback", hook: broken}
    compiled = torch.compile(lambda x: x.sin() + 1, backend=triptych.compile_fx, options=options)
    assert torch.equal(compiled(X), X.sin() + 1)
    assert f"{hook}: {broken.__name__} leaves an invalid graph: " in caplog.text


def test_a_user_pass_may_leave_the_order_to_the_sort():
    def unordered(graph):
        nodes = list(graph.nodes)
        nodes[2].append(nodes[1])  # a value used before it is made

    gm = aten()
    session = run("joint", gm, joint_custom_post_pass=unordered)
    assert torch.equal(gm(X), X.relu() + 1) and not session.warnings


def forget_names():
    for cached in (pipeline.pass_names, pipeline.option_defaults, pipeline.rule_names):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def names_of_the_real_pipeline():
    yield
    forget_names()


def with_pass(monkeypatch, stage, *passes):
    monkeypatch.setitem(pipeline.STAGES, stage, passes)
    forget_names()


@dataclass(frozen=True)
class BehindItsBack(SoundByRule):
    """An edit that no check of the rewriter looks at."""

    def make(self, rewriter, op):
        relu, add = list(rewriter.program.graph.nodes)[1:3]
        add.replace_all_uses_with(relu.args[0])


class ReturnInput(Rule):
    """relu(x) + 1 -> x"""

    def sites(self, program):
        yield Match.at(program, list(program.graph.nodes)[1])

    def rewrite(self, op):
        return BehindItsBack()


@dataclass(frozen=True)
class Wrong(Pass):
    """Makes the output an input."""

    name = "wrong"

    def rules(self):
        return [ReturnInput()]


@pytest.mark.parametrize("level", ["each", "final"])
def test_a_pass_that_breaks_the_contract_is_undone_and_reported(monkeypatch, level):
    with_pass(monkeypatch, "joint", Wrong)
    gm = aten()
    session = run("joint", gm, verify=level, on_error="fallback")
    assert torch.equal(gm(X), X.relu() + 1)
    assert "undone" in session.warnings[0] and "sharing" in session.warnings[0]
    named = "pass wrong, rule wrong: new sharing" if level == "each" else "stage joint breaks the test graph .*wrong"
    with pytest.raises(triptych.VerificationError, match=named):
        run("joint", aten(), verify=level, on_error="raise")


class Oops(Rule):
    """relu(x) -> oops"""

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, op, x):
        raise ZeroDivisionError("oops")


@dataclass(frozen=True)
class Failing(Pass):
    """Has a rule that raises."""

    name = "failing"

    def rules(self):
        return [Oops()]


def test_a_rule_that_raises_is_skipped_or_with_verify_an_error(monkeypatch):
    with_pass(monkeypatch, "joint", Failing)
    session = run("joint", aten())
    assert "oops" in session.records[0].error and session.warnings
    with pytest.raises(RuleError, match="pass failing, rule oops"):
        run("joint", aten(), verify="each")
    assert run("joint", aten(), remove_passes="oops").records[0].error is None


class CountLevel(Rule):
    """relu(x) -> relu(x), counted by the level"""

    def __init__(self, level=0):
        self.level = level

    def sites(self, program):
        yield Match.at(program, list(program.graph.nodes)[1], names=[f"level {self.level}"])

    def rewrite(self, op, m):
        return op.relu(m.root.node.args[0])


@dataclass(frozen=True)
class Configured(Pass):
    """Has an option, and runs only if added."""

    name = "configured"
    default = False
    level: int = 3

    def rules(self):
        return [CountLevel(self.level)]


def test_options_and_names_are_exact(monkeypatch):
    with_pass(monkeypatch, "joint", Failing, Configured)
    assert [r.name for r in run("joint", aten()).records] == ["failing"]
    session = run("joint", aten(), add_passes="configured", remove_passes=["failing"], **{"configured.level": 5})
    assert session.records[0].fired == {"level 5": 1}
    for wrong, kind, near in [
        ({"add_passes": "configurd"}, "pass", "configured"),
        ({"remove_passes": "fail"}, "pass", "failing"),
        ({"configured.lvel": 1}, "option", "configured.level"),
        ({"codegen": "inducter"}, "codegen", "inductor"),
        ({"verifi": "each"}, "option", "verify"),
        ({"verify": "eech"}, "verify", "each"),
        ({"mode": "max-autotun"}, "mode", "max-autotune"),
    ]:
        with pytest.raises(UnknownName, match=near) as error:
            Options.make(wrong)
        assert kind in str(error.value)
    with pytest.raises(UnknownName, match="pre_grad"):
        triptych.list_passes("pregrad")
    assert Options.make(Options(codegen="eager"), mode="reduce-overhead").mode == "reduce-overhead"
    with pytest.raises(UnknownName, match="configured"):
        Options.make(Options(add_passes="configurd"))
    with pytest.raises(TriptychError, match="callable"):
        run("joint", aten(), joint_custom_pre_pass=[3])


def test_records_tell_counts_time_and_listings(monkeypatch):
    session = run("joint", aten(lambda x: (x.clone() + 1) * 2), joint_custom_post_pass=relu_to_neg)
    for record in session.records:
        assert record.stage == "joint" and record.seconds >= 0 and record.before and record.after
        assert record.changed == (record.before != record.after)
        assert record.nodes_before == record.before.count("\n") + 1
    ordinals = [r.ordinal for r in session.records]
    assert ordinals == sorted(ordinals)
    assert run("joint", aten(), observed=False).records[0].before == ""


def test_the_rewrite_limit_bisects(monkeypatch):
    gm = aten(lambda x: (x.clone() * 2).clone() + x.clone())
    full = run("joint", copy.deepcopy(gm)).rewrites
    assert full >= 2
    session = Session(Options(), rewrite_limit=1)
    run_stage("joint", gm, session, graph="test")
    assert session.rewrites == 1


def test_a_formula_may_be_longer_than_a_line():
    """The documentation, the page and `triptych passes` show it whole, and without the explanation."""

    class OverTwoLines(Rule):
        """f(x) -> g(x), where x is
        not empty

        Why it is right.
        """

    assert OverTwoLines.formula() == "f(x) -> g(x), where x is not empty"


def test_summaries_say_what_every_pass_of_ours_does():
    """Without a row in the table, its rewrites would be counted as other rewrites."""
    entries = [entry for stage in pipeline.STAGES.values() for entry in stage]
    passes = {entry.name for entry in entries if not isinstance(entry, pipeline.Hook)}
    assert passes - EFFECT_OF_PASS.keys() == set()
    assert EFFECT_OF_PASS.keys() - passes == set()
