"""The user's own rules: given in `add_rules` or a hook, made of two functions, and asked about with `why_not`."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import triptych
from triptych.cache import cache_key
from triptych.cli import main
from triptych.passes.catalogue import rules_of
from triptych.passes.session import watching

EAGER = {"codegen": "eager"}


class SiluByHand(triptych.Rule):
    """x * sigmoid(x) -> silu(x)"""

    exact = False

    def pattern(self, op, x):
        return op.mul(op.sigmoid(x), x)

    def rewrite(self, op, x):
        return op.silu(x)


def gated(x, y):
    return torch.relu(x + y) * 2 + torch.sigmoid(x) * x


RELU_OF_SUM = triptych.rule(
    lambda x, y: torch.relu(x + y), lambda x, y: torch.clamp_min(x + y, 0), name="relu_of_sum"
)
INPUTS = torch.randn(4, 8), torch.randn(4, 8)


def fired(explanation, stage=None):
    found = {}
    for record in explanation.passes:
        if record.name == "add_rules" and stage in (None, record.stage):
            found |= record.fired
    return dict(found)


@pytest.mark.parametrize("rule", [SiluByHand, SiluByHand()], ids=["class", "instance"])
@pytest.mark.parametrize("train", [False, True])
def test_an_added_rule_runs_with_the_others(rule, train):
    x, y = (t.clone().requires_grad_(train) for t in INPUTS)
    options = {**EAGER, "add_rules": [rule, RELU_OF_SUM], "verify": "each"}
    seen = triptych.explain(gated, x, y, train=train, options=options)
    assert fired(seen, "pre_grad") == {"silu_by_hand": 1, "relu_of_sum": 1}
    compiled = torch.compile(gated, backend="triptych", options=options)
    torch.testing.assert_close(compiled(x, y), gated(x, y))
    if train:
        wants = torch.autograd.grad(gated(x, y).sum(), (x, y))
        torch.testing.assert_close(torch.autograd.grad(compiled(x, y).sum(), (x, y)), wants)


def test_a_rule_runs_in_the_stages_that_it_names():
    class Late(SiluByHand):
        """x * sigmoid(x) -> silu(x)"""

        stages = ("joint",)

    seen = triptych.explain(gated, *INPUTS, options={**EAGER, "add_rules": Late})
    assert fired(seen, "pre_grad") == {} and fired(seen, "joint") == {"late": 1}


def test_a_rule_that_raises_is_named_with_the_option_it_came_by():
    class Broken(SiluByHand):
        """x * sigmoid(x) -> an error"""

        def rewrite(self, op, x):
            raise ValueError("no")

    for option in ("add_rules", "joint_custom_pre_pass"):
        options = {**EAGER, option: [Broken]}
        seen = triptych.explain(gated, *INPUTS, options={**options, "on_error": "fallback"})
        assert f"{option}: rule broken raised ValueError: no at " in str(seen)
        with pytest.raises(Exception, match=f"RuleError: pass {option}, rule broken: ValueError: no"):
            torch.compile(gated, backend="triptych", options=options)(*INPUTS)


@pytest.mark.parametrize("times, wanted", [(1, "no at mul in the joint graph; that rewrite was left out"),
                                           (2, "no at mul, and 1 more time in the joint graph; those rewrites were left out"),
                                           (40, "no at mul, and 39 more times in the joint graph; those rewrites were left out")])  # fmt: skip
def test_a_rule_that_raises_is_logged_once_and_recorded_for_every_site(times, wanted, caplog):
    class Broken(SiluByHand):
        """x * sigmoid(x) -> an error"""

        stages = ("joint",)

        def rewrite(self, op, x):
            raise ValueError("no")

    def program(x):
        for _ in range(times):
            x = x * torch.sigmoid(x)
        return x

    options = {**EAGER, "add_rules": Broken, "on_error": "fallback"}
    seen = triptych.explain(program, INPUTS[0], options=options)
    logged = [record.getMessage() for record in caplog.records if "raised" in record.getMessage()]
    assert logged == [f"add_rules: rule broken raised ValueError: {wanted}"]
    assert [w for w in seen.warnings if "raised" in w] == [logged[0].partition(" in the joint")[0]]
    (record,) = (record for record in seen.passes if record.error)
    assert sum(decline.raised for decline in record.declines) == times and "Traceback" in record.error


def test_an_added_rule_is_removed_by_name():
    options = {**EAGER, "add_rules": [SiluByHand], "remove_passes": "silu_by_hand"}
    assert fired(triptych.explain(gated, *INPUTS, options=options)) == {}


def test_a_function_is_no_rule():
    with pytest.raises(triptych.TriptychError, match="add_rules takes a Rule .*, not function"):
        triptych.Options.make({"add_rules": [gated]})


def test_the_cache_key_covers_added_rules():
    keys = [cache_key({"add_rules": rules}) for rules in ([], [SiluByHand], [RELU_OF_SUM], [SiluByHand, RELU_OF_SUM])]
    assert None not in keys and len(set(keys)) == 4


def test_the_first_hook_sees_the_graph_as_it_was_captured():
    seen = []

    def look(graph):
        seen.extend(str(node.target) for node in graph.nodes if node.op == "call_method")

    triptych.explain(lambda x: x.mul(2).t(), INPUTS[0], options={**EAGER, "pre_grad_custom_pre_pass": look})
    assert seen == ["mul", "t"]


# ---- rules made of functions ----


def applied(rule, program, *inputs, **options):
    """The rules that fired, after the result was compared with eager."""
    options = {**EAGER, "add_rules": [rule], "verify": "each", **options}
    torch.testing.assert_close(torch.compile(program, backend="triptych", options=options)(*inputs), program(*inputs))
    return fired(triptych.explain(program, *inputs, options=options))


def test_functions_in_the_language_of_rules():
    rule = triptych.rule(lambda op, x: op.exp(op.log(x)), lambda op, x: x, name="exp_of_log")
    assert applied(rule, lambda x: torch.exp(torch.log(x + 2)) * 3, torch.rand(4)) == {"exp_of_log": 1}


def test_a_rule_of_functions_in_the_joint_graph():
    rule = triptych.rule(
        lambda x, y: torch.relu(x + y), lambda x, y: (x + y).clamp(min=0), name="clamped", stages=["joint"]
    )
    assert applied(rule, gated, *INPUTS) == {"clamped": 1}


def test_example_inputs_tell_the_rank():
    rule = triptych.rule(
        lambda x: x.t().sum(-1), lambda x: x.sum(0), name="sum_of_rows", example_inputs=[torch.empty(3, 5)]
    )
    assert applied(rule, lambda x: x.transpose(0, 1).sum(dim=1), INPUTS[0]) == {"sum_of_rows": 1}


def test_a_check_declines_with_its_reason():
    def check(m, x):
        m.require(x.dtype == torch.float64, "only for double precision")

    rule = triptych.rule(lambda x: torch.sigmoid(x) * x, lambda x: torch.nn.functional.silu(x), name="silu", check=check)
    seen = triptych.explain(gated, *INPUTS, options={**EAGER, "add_rules": [rule]})
    assert fired(seen) == {}
    assert any("only for double precision" in d.reason for r in seen.passes for d in r.declines)
    assert applied(rule, gated, *(t.double() for t in INPUTS)) == {"silu": 1}


def test_several_results():
    rule = triptych.rule(
        lambda x, y: (torch.exp(x) * y, torch.exp(x) + y), lambda x, y: (y * torch.exp(x), y + torch.exp(x)), name="swap"
    )
    gm = triptych.explain(lambda x, y: (x.exp() * y, x.exp() + y), *INPUTS, options=EAGER).graphs["dynamo"]
    assert len(rule.pattern(None)) == 2 and triptych.find(rule, gm) is not None


def test_functions_of_different_parameters():
    with pytest.raises(triptych.TriptychError, match="different parameters"):
        triptych.rule(lambda x: x.relu(), lambda x, y: x + y)


def test_a_pattern_that_writes():
    with pytest.raises(triptych.TriptychError, match="a pattern cannot contain"):
        triptych.rule(lambda x: x.add_(1), lambda x: x + 1)


# ---- why_not ----


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def test_why_not_takes_the_name_of_a_pass_and_begins_with_where_it_fires():
    answer = triptych.why_not("remove_noop_pass", lambda x: (x.view(4, 8) + 1).view(2, 16), INPUTS[0])
    assert [one.rule for one in answer.fires] == ["noop_reshape"]
    assert "test_user_rules.py" in answer.fires[0].source
    assert str(answer).startswith("noop_reshape at ")


def test_why_not_takes_every_name_that_explain_prints():
    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8))

        def forward(self, q, k, v):
            x = attention(q, k, v)
            return sum(torch.relu(layer(x)) for layer in self.layers)

    q = torch.randn(2, 4, 8)
    seen = triptych.explain(Towers(), q, q, q, options=EAGER)
    names = {name for record in seen.passes for name in record.fired}
    assert {"fuse_attention", "batch_linear"} <= names
    for name in sorted(names):
        assert rules_of(name)
    for name in ("fuse_attention", "batch_linear"):
        assert {one.rule for one in triptych.why_not(name, Towers(), q, q, q).fires} >= {name}


def test_a_class_in_a_hook_that_is_no_rule_is_not_instantiated():
    class MadeOfAGraph:
        def __init__(self, graph):
            self.graph = graph

    options = {**EAGER, "post_grad_custom_post_pass": MadeOfAGraph}
    assert rules_of("fuse_attention", triptych.options.Options.make(options))


def test_joined_weights_say_what_they_would_cost():
    class Projections(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    answer = triptych.why_not("joined_weights", Projections(), torch.randn(2, 64))
    assert answer.fires or any("would cost" in miss.reason for miss in answer)


def test_why_not_takes_the_name_of_a_users_rule():
    options = {**EAGER, "add_rules": [SiluByHand], "joint_custom_pre_pass": [RELU_OF_SUM]}
    answer = triptych.why_not("silu_by_hand", gated, *INPUTS, options=options)
    assert [one.rule for one in answer.fires] == ["silu_by_hand"]


@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass"])
def test_why_not_takes_the_name_of_a_rule_in_any_hook(hook):
    answer = triptych.why_not("silu_by_hand", gated, *INPUTS, options={hook: [SiluByHand, RELU_OF_SUM]})
    assert [one.rule for one in answer.fires] == ["silu_by_hand"]


class TanByHand(triptych.Rule):
    """sin(x) / cos(x) -> tan(x)"""

    exact = False

    def pattern(self, op, x):
        return op.div(op.sin(x), op.cos(x))

    def rewrite(self, op, x):
        return op.tan(x)


class NoSine(triptych.Rule):
    """sin(x) -> cos(x - pi / 2)"""

    exact = False
    stages = ("joint",)

    def pattern(self, op, x):
        return op.sin(x)

    def rewrite(self, op, x):
        return op.cos(op.sub(x, math.pi / 2))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"add_rules": [TanByHand, NoSine]}, "at sin (pre_grad): an earlier pass, add_rules (tan_by_hand), rewrote this node"),
        ({"joint_custom_pre_pass": TanByHand}, "at sin (joint): an earlier pass, joint_custom_pre_pass (tan_by_hand), rewrote"),
    ],
    ids=["an earlier stage", "the same stage"],
)
def test_why_not_names_the_pass_that_rewrote_the_site_first(options, says):
    def program(x):
        return torch.sin(x) / torch.cos(x)

    answer = triptych.why_not(NoSine, program, INPUTS[0], options=options)
    assert not answer.fires and says in str(answer[0])


def test_why_not_says_that_a_hook_is_no_rule():
    message = "'add_rules' is a hook.*: ask for one of your rules in it "
    with pytest.raises(triptych.TriptychError, match=message + "[(]silu_by_hand, relu_of_sum[)]"):
        triptych.why_not("add_rules", gated, *INPUTS, options={"add_rules": [SiluByHand, RELU_OF_SUM]})
    with pytest.raises(triptych.TriptychError, match="'joint_custom_pre_pass' is a hook.*, by its class or its name"):
        triptych.why_not("joint_custom_pre_pass", gated, *INPUTS)


class Endless(triptych.Rule):
    """x * y -> (x * y) + 0"""

    exact = False

    def pattern(self, op, x, y):
        return op.mul(x, y)

    def rewrite(self, op, x, y):
        return op.add(op.mul(x, y), 0)


class There(triptych.Rule):
    """relu(x) -> clamp(x, min=0)"""

    exact = False

    def pattern(self, op, x):
        return op.relu(x)

    def rewrite(self, op, x):
        return op.clamp(x, min=0)


class Back(triptych.Rule):
    """clamp(x, min=0) -> relu(x)"""

    exact = False

    def pattern(self, op, x):
        return op.clamp(x, min=0)

    def rewrite(self, op, x):
        return op.relu(x)


@pytest.mark.parametrize(
    ("rule", "others", "says"),
    [
        (Endless, [], "endless rewrites its own result again and again"),
        (There, [Back], "the results of back, there are rewritten again and again"),
    ],
)
def test_why_not_of_a_rule_that_finds_no_end_shows_the_first_sites_and_says_so(rule, others, says):
    def program(x, y):
        return torch.relu(x * y) + 1

    answer = triptych.why_not(rule, program, *INPUTS, options={"add_rules": others})
    lines = str(answer).splitlines()
    assert len(lines) <= 10
    assert "fires" in lines[0] and "test_user_rules.py" in lines[0]
    fired = [one for one in answer.fires if one.graph == "pre_grad"]
    assert len(fired) > 100
    assert f"  in all it fired {len(fired)} times in pre_grad, and was stopped: " in str(answer)
    assert says in str(answer)
    assert answer.stopped[0].graph == "pre_grad"


def test_explain_says_that_a_rule_found_no_end():
    explanation = triptych.explain(gated, *INPUTS, options={**EAGER, "add_rules": [Endless]})
    (warning,) = [one for one in explanation.warnings if "pre_grad" in one]
    assert warning.startswith("pass add_rules of stage pre_grad was stopped at the limit of ")
    assert "endless rewrites its own result again and again" in warning


def test_why_not_asks_a_users_rule_in_training():
    x = INPUTS[0].clone().requires_grad_()
    answer = triptych.why_not(SiluByHand, lambda x: torch.sigmoid(x) * x, x, train=True)
    assert [(one.rule, one.graph) for one in answer.fires] == [("silu_by_hand", "pre_grad")]


def test_why_not_says_that_it_fires_everywhere_and_that_nothing_is_there():
    assert "fires everywhere it could" in str(triptych.why_not(SiluByHand, lambda x: torch.sigmoid(x) * x, INPUTS[0]))
    assert "none of its operations is here" in str(triptych.why_not(SiluByHand, lambda x: x + 1, INPUTS[0]))


def test_why_not_of_a_graph_without_shapes_asks_for_inputs():
    attention = torch.fx.symbolic_trace(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    assert "the graph has no shapes" in str(triptych.why_not("fuse_attention", attention))
    inputs = [torch.randn(2, 2, 8, 16) for _ in range(3)]
    assert triptych.why_not("fuse_attention", attention, *inputs).fires


def test_why_not_takes_keyword_arguments_and_options():
    answer = triptych.why_not("noop_reshape", gated, INPUTS[0], y=INPUTS[1], options={"remove_passes": "noop_reshape"})
    assert not answer.fires


FILE = """
import torch, triptych

class SiluByHand(triptych.Rule):
    "x * sigmoid(x) -> silu(x)"
    exact = False
    def pattern(self, op, x):
        return op.mul(op.sigmoid(x), x)
    def rewrite(self, op, x):
        return op.silu(x)

class Gate(torch.nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * x

def make():
    return Gate(), (torch.randn(4),)
"""


def test_why_not_on_the_command_line_with_a_rule_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    result = CliRunner().invoke(main, ["why-not", f"{file}:SiluByHand", f"{file}:make", "--option", "verify=each"])
    assert result.exit_code == 0, result.output
    assert "silu_by_hand at " in result.output and "fires everywhere it could" in result.output
    wrong = CliRunner().invoke(main, ["why-not", f"{file}:SiluByHnd", f"{file}:make"])
    assert "did you mean 'SiluByHand'?" in wrong.output


SPELLINGS = {
    "negative dim": (lambda x: x.sum(-1), lambda x: x.mean(-1) * 4, lambda x: x.sin().sum(-1)),
    "negative dim, kept": (
        lambda x: x.mean(-1, keepdim=True), lambda x: x.sum(-1, keepdim=True) / 4, lambda x: x.sin().mean(-1, True)
    ),
    "softmax": (
        lambda x: torch.softmax(x, -1), lambda x: torch.log_softmax(x, -1).exp(), lambda x: x.sin().softmax(-1)
    ),
    "view(-1)": (lambda x: x.view(-1).relu(), lambda x: x.relu().view(-1), lambda x: x.sin().view(-1).relu()),
    "unsqueeze(-1)": (
        lambda x: x.unsqueeze(-1) * 2, lambda x: (x * 2).unsqueeze(-1), lambda x: x.sin().unsqueeze(-1) * 2
    ),
    "transpose": (
        lambda x: x.transpose(1, -1).relu(), lambda x: x.relu().mT, lambda x: x.sin().transpose(1, 2).relu()
    ),
    "index": (lambda x: x[:, 0].relu(), lambda x: x.select(1, 0).clamp(min=0), lambda x: x.sin()[:, 0].relu()),
    "cat": (
        lambda x, y: torch.cat([x, y], -1).relu(), lambda x, y: torch.cat([x.relu(), y.relu()], -1),
        lambda x: torch.cat([x.sin(), x.cos()], -1).relu(),
    ),
    "norm": (
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: torch.nn.functional.rms_norm(x, (4,), eps=1e-6),
        lambda x: (lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))(x.sin()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("hook", ["add_rules", "pre_grad_custom_pre_pass"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_pattern_is_written_as_the_program_is(name, hook):
    """Nobody who writes a rule knows a rank: negative dims, transposes and indices mean what they mean in a program."""
    pattern, replacement, program = SPELLINGS[name]
    mine = triptych.rule(pattern, replacement, name="mine", exact=False)
    x = torch.randn(2, 3, 4)
    torch._dynamo.reset()
    with watching() as sessions:
        made = torch.compile(program, backend=triptych.compile_fx, options={"codegen": "eager", hook: [mine]})(x)
    assert sum(r.fired["mine"] for s in sessions for r in s.records) >= 1
    torch.testing.assert_close(made, program(x))


def test_a_dim_in_the_language_of_rules():
    class SumOfLast(triptych.Rule):
        """sum(x, -1) -> 4 * mean(x, -1), up to rounding"""

        exact = False

        def pattern(self, op, x):
            return op.sum(x, -1)

        def rewrite(self, op, x):
            return op.mul(op.mean(x, -1), 4.0)

    assert len(triptych.why_not(SumOfLast, lambda x: x.sin().sum(-1), torch.randn(2, 3, 4)).fires) >= 1
    assert not triptych.why_not(SumOfLast, lambda x: x.sin().sum(1), torch.randn(2, 3, 4)).fires


@pytest.mark.parametrize("name", ["keep_overwritten", "lift_constants", "draw_into_empty_memory"])
def test_why_not_of_what_cannot_be_removed(name):
    """Where a constant is lifted, only the default code generator wants it so: nothing fires here, and nothing raises."""
    assert str(triptych.why_not(name, lambda x: x + torch.tensor(2.0), torch.ones(3)))
    with pytest.raises(triptych.TriptychError, match="cannot be removed"):
        triptych.Options.make({"remove_passes": [name]})


def test_wrong_arguments_are_said():
    with pytest.raises(triptych.TriptychError, match="why_not takes a model"):
        triptych.find("noop_clone", torch.nn.Linear(2, 2))
    with pytest.raises(triptych.TriptychError, match="named by strings"):
        triptych.Options.make({"remove_passes": triptych.list_passes()[:1]})
    with pytest.raises(triptych.TriptychError, match="True or False"):
        triptych.Options.make({"freeze": "yes"})
    with pytest.raises(triptych.UnknownName) as error:
        triptych.why_not("fuse_attentio", lambda x: x, torch.ones(2))
    assert str(error.value).count("'fuse_attention'") == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_operands_of_a_replacement_keep_their_order(seed):
    """Whatever order Python has for names in a set."""
    program = (
        "import torch, triptych\n"
        "mine = triptych.rule(lambda a, b, c: (a - b) / c, lambda a, b, c: a / c - b / c, name='mine', exact=False)\n"
        "x, y, z = (torch.full((3,), n) for n in (7.0, 1.0, 2.0))\n"
        "for stages in (('pre_grad',), ('joint',)):\n"
        "    torch._dynamo.reset()\n"
        "    type(mine).stages = stages\n"
        "    options = {'codegen': 'eager', 'add_rules': [mine]}\n"
        "    print(torch.compile(lambda x, y, z: (x - y) / z, backend=triptych.compile_fx, options=options)(x, y, z)[0].item())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == ["3.0", "3.0"]
