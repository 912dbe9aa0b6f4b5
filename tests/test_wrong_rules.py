"""What is wrong with a user's rule is an error where the rule is written, or at the latest where it first runs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest
import torch

import triptych
from triptych.errors import RuleError, TriptychError, UnknownName
from triptych.options import HOOKS, STAGES_OF_RULES
from triptych.pipeline import STAGES
from triptych.testing import declines, fires, run_example

EAGER = {"codegen": "eager"}
X = torch.randn(4, 8)


def relu_plus_one(x):
    return torch.relu(x) + 1


class Relu(triptych.Rule):
    """relu(x) -> clamp_min(x, 0)"""

    exact = False

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, op, x):
        return op.clamp_min(x, 0)


def compiled(rule, **options):
    torch._dynamo.reset()
    return torch.compile(relu_plus_one, backend="triptych", options={**EAGER, "add_rules": [rule], **options})


# ---- where the class is defined ----


def subclass(**body):
    return type("Mine", (Relu,), body)


WRONG_CLASSES = {
    "operation": ({"pattern": lambda self, op, x: op.sofmax(x)}, "rule mine: unknown operation 'sofmax'; did you mean 'softmax'"),
    "parameter": ({"pattern": lambda self, op, x: op.softmax(x, dimm=1)}, "unknown parameter of softmax 'dimm'; did you mean 'dim'"),
    "too many arguments": ({"pattern": lambda self, op, x: op.relu(x, 1)}, "relu takes self; 2 arguments were given by position"),
    "no self": ({"pattern": lambda op, x: op.relu(x)}, r"is a method: write def pattern\(self, op, ...\)"),
    "no self in check": ({"check": lambda m, x: None}, r"is a method: write def check\(self, m, ...\)"),
    "one of several": ({"pattern": lambda self, op, x: op.one_of(["relu", "tan_h"], x)}, "unknown operation 'tan_h'; did you mean 'tanh'"),
    "optional": ({"pattern": lambda self, op, x: op.optional("reluu", x)}, "unknown operation 'reluu'"),
    "capture of check": ({"check": lambda self, m, xx: None}, "asks for 'xx', which the pattern does not capture; did you mean 'x'"),
    "capture of rewrite": ({"rewrite": lambda self, op, other: other}, "asks for 'other', which the pattern does not capture; known: x"),
    "misspelt flag": ({"exct": False}, "Mine sets 'exct', which no rule has; did you mean 'exact'"),
    "flag in the singular": ({"mixed_dtype": True}, "Mine sets 'mixed_dtype', which no rule has; did you mean 'mixed_dtypes'"),
    "no pattern at all": ({"pattern": lambda self, op, x: None}, "must return a pattern built with `op`"),
    "restriction": ({"pattern": lambda self, op, x: op.relu(x), "stages": ("joint", "postgrad")}, "rule mine 'postgrad'; did you mean 'post_grad'"),
    "stages as a string": ({"stages": "joint"}, r"stages of the rule mine are a tuple of names, not 'joint': write \('joint',\)"),
    "stages as a number": ({"stages": 3}, "are a tuple of names, not 3"),
    "an example": ({"examples": [fires(relu_plus_one, "f32[3]"), relu_plus_one]}, "examples of the rule mine .* one of them is of type function"),
    "examples": ({"examples": declines(relu_plus_one, "f32[3]")}, "examples of the rule mine .* not of type Example"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CLASSES)
def test_a_class_that_is_wrong_cannot_be_defined(name):
    body, message = WRONG_CLASSES[name]
    with pytest.raises(TriptychError, match=message):
        subclass(**body)


def test_the_traceback_leads_to_the_line_of_the_pattern():
    with pytest.raises(UnknownName) as raised:

        class Misspelt(triptych.Rule):
            """sine(x) -> cos(x)"""

            def pattern(self, op, x):
                return op.sine(x)

    files = [str(entry.path) for entry in raised.traceback]
    assert files.count(__file__) == 2  # the class statement, and the pattern


def test_examples_that_are_created_later_are_not_created_for_the_check():
    from triptych.rewrite.examples import lazily

    made = []
    late = subclass(examples=lazily(lambda: made.append(1) or [fires(relu_plus_one, "f32[3]")]))
    assert not made
    assert len(late.examples) == 1 and made


def test_the_stages_are_those_of_the_pipeline():
    there = {stage for stage, entries in STAGES.items() if any(entry.name == "add_rules" for entry in entries)}
    assert there == set(STAGES_OF_RULES)


# ---- where the rule is created ----


@dataclass(frozen=True)
class Any_(triptych.Rule):
    """Reads its instance, so its pattern exists for instances only."""

    operation: str = ""

    def pattern(self, op, x):
        return getattr(op, self.operation)(x)

    def rewrite(self, op, x):
        return x


def test_a_pattern_that_reads_the_instance_is_checked_with_it():
    assert Any_("relu").name == "any_"
    with pytest.raises(UnknownName, match="rule any_: unknown operation 'reluu'; did you mean 'relu'"):
        Any_("reluu")


def test_a_rule_without_a_hash_runs():
    unhashable = dataclass(type("Unhashable", (Relu,), {"__annotations__": {"least": float}, "least": 0.0}))
    rules = [unhashable(), unhashable(least=1.0)]
    assert type(rules[0]).__hash__ is None
    for rule in rules:
        seen = triptych.explain(relu_plus_one, X, options={**EAGER, "add_rules": [rule]})
        assert sum(record.fired["unhashable"] for record in seen.passes) == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_a_class_that_needs_arguments_is_given_as_an_instance(hook):
    class Needs(Relu):
        """relu(x) -> clamp_min(x, least)"""

        def __init__(self, least):
            self.least = least

    torch._dynamo.reset()
    message = "Needs cannot be created .*'least'.*: give an instance, not the class"
    with pytest.raises(Exception, match=message):
        torch.compile(relu_plus_one, backend="triptych", options={**EAGER, hook: [Needs]})(X)
    with pytest.raises(TriptychError, match=message):
        triptych.why_not(Needs, relu_plus_one, X)


def test_what_is_set_later_is_not_an_error():
    class Later(Relu):
        """Its operation is given after it is created."""

        def pattern(self, op, x):
            return getattr(op, self.operation)(x)

    rule = Later()
    rule.operation = "relu"
    assert len(triptych.find(rule, torch.fx.symbolic_trace(relu_plus_one))) == 1


def test_a_pattern_may_use_what_is_defined_below_it():
    class Early(Relu):
        """Uses a helper that follows."""

        def pattern(self, op, x):
            return helper(op, x)

    def helper(op, x):
        return op.relu(x)

    assert len(triptych.find(Early, torch.fx.symbolic_trace(relu_plus_one))) == 1


def test_a_base_class_need_not_be_complete():
    class Base(triptych.Rule, ABC):
        """For others."""

        @abstractmethod
        def inner(self, op, x): ...

        def rewrite(self, op, x):
            return x

    class Concrete(Base):
        """relu(relu(x)) -> x"""

        def inner(self, op, x):
            return op.relu(x)

        def pattern(self, op, x):
            return op.relu(self.inner(op, x))

    assert Concrete().name == "concrete"
    with pytest.raises(TypeError, match="abstract"):
        Base()


def test_a_rule_without_a_pattern():
    class Patternless(triptych.Rule):
        """Its pattern is misspelt."""

        def patern(self, op, x):
            return op.relu(x)

        def rewrite(self, op, x):
            return x

    with pytest.raises(TriptychError, match=r"Patternless has no pattern: define .* \(it defines 'patern'\)"):
        Patternless()
    for option in HOOKS:
        with pytest.raises(TriptychError, match="Patternless has no pattern"):
            triptych.Options.make({option: [Patternless]})


def test_a_rule_without_a_rewrite_can_be_looked_for_but_not_run():
    class OnlyLooks(triptych.Rule):
        """relu(x)"""

        def pattern(self, op, x):
            return op.relu(x)

    assert len(triptych.find(OnlyLooks, torch.fx.symbolic_trace(relu_plus_one))) == 1
    for option in HOOKS:
        with pytest.raises(TriptychError, match="OnlyLooks has no rewrite: define"):
            triptych.Options.make({option: OnlyLooks()})


def test_the_dtype_of_an_example_is_one():
    with pytest.raises(UnknownName, match="unknown dtype of an example 'f33'; did you mean 'f32'"):
        run_example(Relu(), fires(relu_plus_one, "f33[4]"), "torch")


# ---- rules of two functions ----

WRONG_FUNCTIONS = {
    "pattern in torch": (lambda x: torch.sofmax(x), lambda x: x, {}, "has no attribute 'sofmax'; did you mean 'softmax'"),
    "pattern in the language": (lambda op, x: op.sofmax(x), lambda op, x: x, {}, "rule sums: unknown operation 'sofmax'; did you mean 'softmax'"),
    "replacement in torch": (lambda x: torch.relu(x), lambda x: torch.reluu(x), {}, "has no attribute 'reluu'; did you mean 'relu'"),
    "capture of check": (lambda op, x: op.relu(x), lambda op, x: x, {"check": lambda m, y: None}, "check of rule sums asks for 'y'"),
    "stage": (lambda op, x: op.relu(x), lambda op, x: x, {"stages": ["join"]}, "rule sums 'join'; did you mean 'joint'"),
    "stages as a string": (lambda op, x: op.relu(x), lambda op, x: x, {"stages": "joint"}, "are a tuple of names, not 'joint'"),
    "a builtin": (torch.relu, lambda x: x, {}, "relu has no parameters that can be read: say lambda x: relu"),
    "examples": (lambda op, x: op.relu(x), lambda op, x: x, {"examples": [3]}, "one of them is of type int"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_functions_that_are_wrong_make_no_rule(name):
    pattern, replacement, given, message = WRONG_FUNCTIONS[name]
    with pytest.raises(TriptychError, match=message):
        triptych.rule(pattern, replacement, name="sums", **given)


def test_a_replacement_that_needs_its_operands_is_traced_with_them():
    rule = triptych.rule(
        lambda x: torch.relu(x), lambda x: x.clamp(min=0) if x.shape[0] > 2 else x, stages=["joint"], name="sized"
    )
    seen = triptych.explain(relu_plus_one, X, options={**EAGER, "add_rules": [rule]}, dynamic=False)
    assert sum(record.fired["sized"] for record in seen.passes) == 1


# ---- where it first runs ----

WRONG_REWRITES = {
    "operation": (lambda self, op, x: op.reluu(x), "rule mine: .*unknown operation 'reluu'; did you mean 'relu'"),
    "too many arguments": (lambda self, op, x: op.clamp_min(x, 0, 1), "rule mine: .*clamp_min takes self, min; 3 arguments"),
    "parameter": (lambda self, op, x: op.clamp_min(x, minn=0), "rule mine: .*unknown parameter of clamp_min 'minn'; did you mean 'min'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_REWRITES)
@pytest.mark.parametrize("hook", ["add_rules", "joint_custom_pre_pass"])
def test_a_misspelt_operation_in_a_rewrite_ends_the_compile(name, hook):
    rewrite, message = WRONG_REWRITES[name]
    rule = subclass(rewrite=rewrite)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(relu_plus_one, backend="triptych", options={**EAGER, hook: [rule]})(X)
    with pytest.raises(RuleError, match="rule mine: (unknown|clamp_min takes)"):
        triptych.why_not(rule, torch.fx.symbolic_trace(relu_plus_one))


def test_a_check_that_returns_a_condition_does_not_decline_by_it():
    with pytest.raises(Exception, match=r"returned False: a check declines by m.require\(condition, reason\)"):
        compiled(subclass(check=lambda self, m, x: x.rank == 7))(X)


def test_a_site_that_does_not_give_what_a_rewrite_asks_for():
    class Sites(triptych.Rule):
        """relu(x) -> x"""

        def sites(self, program):
            for node in program.graph.nodes:
                if (call := program.call(node)) is not None and call.op == "relu":
                    yield triptych.Match.at(program, node, operand=program.value(call.args["self"]))

        def rewrite(self, op, operands):
            return operands

    with pytest.raises(Exception, match=r"rewrite asks for 'operands', which the site does not give; did you mean 'operand'"):
        compiled(Sites)(X)


# ---- a rewrite that is refused ----


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class ToSum(Relu):
    """relu(x) -> sum(x), which has another shape"""

    stages = ("joint",)

    def rewrite(self, op, x):
        return op.sum(x)


def test_a_refused_rewrite_is_one_line_for_a_graph(caplog):
    function = torch.compile(
        lambda x: (torch.relu(x) + 1, torch.relu(x + 2)), backend="triptych", dynamic=False,
        options={**EAGER, "add_rules": [ToSum]},
    )  # fmt: skip
    function(X)
    assert lines(caplog) == [
        "add_rules: to_sum matched 2 sites of the joint graph, refused: shape [4, 8] would become []; see triptych.why_not"
    ]


def test_a_rewrite_that_is_refused_at_some_sites(caplog):
    class SumOfRows(ToSum):
        """relu(x) -> x + 0 where x has one dimension, else the sum of x"""

        def rewrite(self, op, x):
            return op.clamp_min(x, 0) if x.rank == 1 else op.sum(x)

    run = torch.compile(
        lambda x, y: (torch.relu(x), torch.relu(y)), backend="triptych", dynamic=False,
        options={**EAGER, "add_rules": [SumOfRows]},
    )  # fmt: skip
    run(X, X[0])
    assert [line.partition(":")[2] for line in lines(caplog)] == [
        " sum_of_rows matched 2 sites of the joint graph, refused at 1 of them: shape [4, 8] would become []; see triptych.why_not"
    ]


def test_what_the_rule_itself_declines_is_its_own_affair(caplog):
    class Wary(ToSum):
        """relu(x) -> sum(x), never"""

        def check(self, m, x):
            m.require(False, "not here")

    class WaryLate(ToSum):
        """The same, said by the rewrite."""

        def rewrite(self, op, m, x):
            m.require(False, "not here")

    for rule in (Wary, WaryLate):
        compiled(rule)(X)
    assert lines(caplog) == []


def test_what_explains_a_refusal_does_not_log_it(caplog):
    triptych.explain(relu_plus_one, X, options={**EAGER, "add_rules": [ToSum]})
    assert "would become []" in str(triptych.why_not(ToSum, relu_plus_one, X))
    assert lines(caplog) == []


def test_our_own_rules_do_not_log_what_is_refused(caplog):
    torch._dynamo.reset()
    torch.compile(lambda x: x.clone().t().contiguous().t(), backend="triptych", options=EAGER)(X)
    assert lines(caplog) == []
