"""What passes share while a graph stays as it is: the index of its calls, and the quick looks that spare the matcher."""

from __future__ import annotations

import pytest
import torch

from tests.big_graphs import BIG_GRAPHS
from triptych.ir.program import Program
from triptych.match.matcher import Matcher
from triptych.rewrite import driver
from triptych.rewrite.refusal import NotConcerned
from triptych.rewrite.rule import CompiledRule, Match
from triptych.stages import joint_graph_passes, post_grad_passes, pre_grad_passes
from triptych.testing.capture import capture_aten, capture_torch

PROGRAMS = sorted(BIG_GRAPHS)[::3]


def attention(x, w):
    q, k, v = ((x @ w).view(2, 4, 2, 4).transpose(1, 2) for _ in range(3))
    weights = torch.softmax(q * 1.0 @ k.transpose(-1, -2) + torch.zeros(4, 4), -1)
    return (weights @ v).transpose(1, 2).reshape(2, 4, 8).to(torch.float32) + x.view(2, 4, 8)[:, 0:4]


def run_all_stages(name):
    own = attention, (torch.randn(2, 4, 8), torch.randn(8, 8))
    program, inputs = own if name == "attention" else BIG_GRAPHS[name](3)
    torch._dynamo.reset()
    gm, given = capture_torch(program, inputs)
    pre_grad_passes(gm, given)
    gm, _ = capture_aten(program, inputs)
    joint_graph_passes(gm)
    post_grad_passes(gm, True)


@pytest.mark.parametrize("name", ["attention", *PROGRAMS])
def test_the_index_is_that_of_the_graph_as_it_is(name, monkeypatch):
    asked = []
    calls_of = Program.calls_of

    def compared(program, *ops):
        nodes = calls_of(program, *ops)
        called = {node: call.op for node in program.graph.nodes if (call := program.call(node)) is not None}
        assert nodes == [node for node, op in called.items() if op in ops]
        assert set(program.ops()) == set(called.values())
        asked.append(ops)
        return nodes

    monkeypatch.setattr(Program, "calls_of", compared)
    run_all_stages(name)
    assert asked


def test_only_the_nodes_that_changed_are_read_again(monkeypatch):
    gm, _ = capture_aten(lambda x: x.relu() + 1, (torch.randn(4),))
    program = Program(gm)
    relu, add = program.calls_of("add", "relu")
    assert [n.name for n in (relu, add)] == ["relu", "add"]
    relu.target = torch.ops.aten.sin.default
    program.changed(relu)
    read = []
    call = program.call
    monkeypatch.setattr(program._call_index, "_call", lambda node: read.append(node) or call(node))
    assert set(program.ops()) == {"sin", "add"}
    assert program.calls_of("relu") == [] and program.calls_of("sin") == [relu]
    assert read == [relu]


@pytest.mark.parametrize("name", ["attention", *PROGRAMS])
def test_a_quick_look_says_no_only_where_the_rule_would(name, monkeypatch):
    spared = []
    concerns = CompiledRule.concerns

    def concerns_after_all(rule, program, node, call):
        answer = concerns(rule, program, node, call)
        for found in () if answer else Matcher(program).find(rule.roots, node):
            spared.append(rule.name)
            with pytest.raises(NotConcerned):
                rule.check(Match(program, found))
        return answer

    monkeypatch.setattr(CompiledRule, "concerns", concerns_after_all)
    run_all_stages(name)
    if name == "attention":
        assert {"noop_reshape", "fold_to_full", "bmm_to_mm"} <= set(spared)


@pytest.mark.parametrize("name", ["attention", *PROGRAMS])
def test_operands_rule_out_only_what_cannot_match(name, monkeypatch):
    """The driver asks about the operands before the matcher; here the answer is always yes, and then nothing matches
    that would have been ruled out."""
    ruled_out = []
    find, are_met = Matcher.find, driver._are_met

    def say_yes(needs, operand_ops):
        if not are_met(needs, operand_ops):
            ruled_out.append(needs)
        return True

    def find_nothing_there(matcher, roots, node):
        found = list(find(matcher, roots, node))
        assert not (found and ruled_out), roots
        return iter(found)

    monkeypatch.setattr(driver, "_are_met", say_yes)
    monkeypatch.setattr(driver, "_apply", forget_after(driver._apply, ruled_out))
    monkeypatch.setattr(Matcher, "find", find_nothing_there)
    run_all_stages(name)


def forget_after(apply, ruled_out):
    def applied(rewriter, matcher, rule, node, *others):
        needs = rule.operand_needs(rewriter.program.call(node).op)
        if needs not in ruled_out:  # those of a rule that looked itself, and was not concerned
            ruled_out.clear()
        try:
            return apply(rewriter, matcher, rule, node, *others)
        finally:
            ruled_out.clear()

    return applied
