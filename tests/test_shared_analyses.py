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
    nodes_by_op = Program.nodes_by_op

    def compared(program):
        index = nodes_by_op(program)
        expected = {}
        for node in program.graph.nodes:
            if (call := program.call(node)) is not None:
                expected.setdefault(call.op, []).append(node)
        assert index == expected
        asked.append(index)
        return index

    monkeypatch.setattr(Program, "nodes_by_op", compared)
    run_all_stages(name)
    assert asked


def test_the_index_is_built_once_for_an_unchanged_graph():
    gm, _ = capture_aten(lambda x: x.relu() + 1, (torch.randn(4),))
    program = Program(gm)
    index = program.nodes_by_op()
    assert program.nodes_by_op() is index and [n.name for n in program.calls_of("add", "relu")] == ["relu", "add"]
    program.changed(index["relu"][0])
    assert program.nodes_by_op() is not index


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
    """The driver asks `may_match` before the matcher; here it always says yes, and then nothing it would have ruled out
    matches."""
    ruled_out = []
    find, may_match = Matcher.find, CompiledRule.may_match

    def say_yes(rule, op, operand_ops):
        if not may_match(rule, op, operand_ops):
            ruled_out.append(rule.roots)
        return True

    def find_nothing_there(matcher, roots, node):
        found = list(find(matcher, roots, node))
        assert not (found and ruled_out and ruled_out[-1] is roots), roots
        return iter(found)

    monkeypatch.setattr(CompiledRule, "may_match", say_yes)
    monkeypatch.setattr(driver, "_apply", forget_after(driver._apply, ruled_out))
    monkeypatch.setattr(Matcher, "find", find_nothing_there)
    run_all_stages(name)


def forget_after(apply, ruled_out):
    def applied(*args):
        try:
            return apply(*args)
        finally:
            ruled_out.clear()

    return applied
