"""From a wrong result to the rewrite at fault: verify, bisect, the limit on rewrites, torch's own bisector."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading

import pytest
import torch
from click.testing import CliRunner

import triptych
from triptych.cli import main
from triptych.explaining.bisect import AT_FAULT, EQUAL, NOT_OURS, bisect_command
from triptych.explaining.demo import SmallTransformer
from triptych.ir.fingerprint import fingerprint
from triptych.ir.program import Program
from triptych.options import Options
from triptych.passes.culprit import first_bad
from triptych.passes.session import watching
from triptych.passes.torch_bisector import SUBSYSTEMS
from triptych.pipeline import STAGES
from triptych.rewrite.driver import run_rules
from triptych.rewrite.examples import make_inputs
from triptych.rewrite.passes import Pass, pass_with_options
from triptych.rewrite.rewriter import Rewriter
from triptych.rewrite.rule import Rule
from triptych.testing.capture import capture
from triptych.testing.subjects import subjects

EAGER = {"codegen": "eager"}


class SiluIsRelu(triptych.Rule):
    """silu(x) -> relu(x)"""

    def pattern(self, op, x):
        return op.silu(x)

    def rewrite(self, op, x):
        return op.relu(x)


class AbsIsIdentity(triptych.Rule):
    """abs(x) * 2 -> x * 2, which is right of what is not negative"""

    def pattern(self, op, x):
        return op.mul(op.abs(x), 2)

    def rewrite(self, op, x):
        return op.mul(x, 2)


class DetachedSquare(triptych.Rule):
    """x * x -> x * detach(x), of which the gradient is half"""

    def pattern(self, op, x):
        return op.mul(x, x)

    def rewrite(self, op, x):
        return op.mul(x, op.detach(x))


class CosIsSin(triptych.Rule):
    """cos(x) -> sin(x): the gradient of sin, in the backward graph"""

    def pattern(self, op, x):
        return op.cos(x)

    def rewrite(self, op, x):
        return op.sin(x)


def narrow_without_saying_so(graph):
    """The value becomes a double, and what is known of it stays."""
    for node in [n for n in graph.nodes if "relu" in str(n.target)]:
        with graph.inserting_after(node):
            wide = graph.call_method("double", (node,))
        wide.meta = dict(node.meta)
        node.replace_all_uses_with(wide)
        wide.args = (node,)


def leave_out_contiguous(graph):
    for node in list(graph.nodes):
        if "contiguous" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def write_twice(graph):
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "add_":
            node.args = (node.args[0], 2 * node.args[1])


def leave_out_clone(graph):
    for node in list(graph.nodes):
        if "clone" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def writes_input(x):
    x.add_(1)
    return x * 3


UNSOUND = [
    pytest.param(lambda x: torch.nn.functional.silu(x) + 1, "pre_grad_custom_pass", SiluIsRelu, False, id="value"),
    pytest.param(lambda x: x.abs() * 2 + 1, "pre_grad_custom_pass", AbsIsIdentity, False, id="negative-inputs"),
    pytest.param(lambda x: (x * x).sum(), "pre_grad_custom_pass", DetachedSquare(), True, id="gradient-only"),
    pytest.param(lambda x: x.sin().sum(), "post_grad_custom_pre_pass", CosIsSin, True, id="backward-graph"),
    pytest.param(lambda x: x.sin().sum(), "joint_custom_post_pass", [CosIsSin()], True, id="joint-graph"),
    pytest.param(lambda x: torch.relu(x) + 1, "pre_grad_custom_pass", narrow_without_saying_so, False, id="dtype"),
    pytest.param(lambda x: x.t().contiguous(), "pre_grad_custom_pass", leave_out_contiguous, False, id="stride"),
    pytest.param(writes_input, "pre_grad_custom_pass", write_twice, False, id="mutation"),
    pytest.param(lambda x: (x.clone(), x + 1), "pre_grad_custom_pass", leave_out_clone, False, id="aliasing"),
]


@pytest.mark.parametrize(("model", "hook", "wrong", "train"), UNSOUND)
def test_verify_each_undoes_an_unsound_rule_and_names_it(model, hook, wrong, train):
    x = torch.randn(4, 6, requires_grad=train)
    options = {**EAGER, "verify": "each", "on_error": "fallback", hook: wrong}
    with torch.set_grad_enabled(train), watching() as sessions:
        copies = [x.detach().clone().requires_grad_(train) for _ in range(2)]
        got = torch.compile(model, backend=triptych.compile_fx, options=options)(copies[0])
        want = model(copies[1])
        torch.testing.assert_close(got, want, check_stride=True)
        torch.testing.assert_close(copies[0], copies[1])
        if train:
            gradients = [torch.autograd.grad(y, c)[0] for y, c in ((got, copies[0]), (want, copies[1]))]
            torch.testing.assert_close(*gradients)
    (record,) = [r for s in sessions for r in s.records if r.error]
    (decline,) = [d for d in record.declines if "verification failed" in d.reason]
    rule = wrong[0] if isinstance(wrong, list) else wrong
    name = rule.rule_name() if hasattr(rule, "rule_name") else rule.__name__
    assert record.name == hook and record.error.startswith("undone") and record.rewrites == 0
    assert decline.rule == name and decline.node
    assert "test_bisect.py:" in decline.source or hook != "pre_grad_custom_pass"


@pytest.mark.parametrize("level", ["final", "each"])
@pytest.mark.parametrize(("model", "hook", "wrong", "train"), UNSOUND)
def test_verify_raises_an_unsound_rule_if_errors_are_to_be_raised(model, hook, wrong, train, level):
    x = torch.randn(4, 6, requires_grad=train)
    options = {**EAGER, "verify": level, "on_error": "raise", hook: wrong}
    compiled = torch.compile(model, backend=triptych.compile_fx, options=options)
    with torch.set_grad_enabled(train), pytest.raises(Exception) as raised:
        result = compiled(x)
        if train:
            torch.autograd.grad(result, x)
    rule = wrong[0] if isinstance(wrong, list) else wrong
    name = rule.rule_name() if hasattr(rule, "rule_name") else rule.__name__
    error = getattr(raised.value, "inner_exception", raised.value)  # Dynamo wraps what a forward's compile raises
    message = str(error)
    assert isinstance(error, triptych.VerificationError) and hook in message
    if level == "each":
        assert f"pass {hook}, rule {name} at " in message
        assert "test_bisect.py:" in message or hook != "pre_grad_custom_pass"


def test_a_bisection_finds_what_verify_would_undo():
    options = {**EAGER, "verify": "each", "pre_grad_custom_pass": SiluIsRelu}
    found = triptych.bisect(lambda x: torch.nn.functional.silu(x) + 1, torch.randn(4, 6), options=options)
    assert found.verdict == AT_FAULT and found.rewrite.rule == "silu_is_relu"


def test_verify_each_names_the_one_wrong_rewrite_of_many():
    def model(x):
        y = x.clamp(min=0).abs() * 2
        return y + x.abs() * 2 + x.exp().abs() * 2

    options = {**EAGER, "verify": "each", "on_error": "fallback", "pre_grad_custom_pass": AbsIsIdentity}
    with torch.no_grad(), watching() as sessions:
        torch.compile(model, backend=triptych.compile_fx, options=options)(torch.randn(3, 3))
    (warning,) = [w for s in sessions for w in s.warnings if "undone" in w]
    first_line = model.__code__.co_firstlineno
    assert "rule abs_is_identity" in warning and f"test_bisect.py:{first_line + 2}" in warning


# ---- bisect ----


def most_compiles(rewrites):
    return 2 * math.log2(rewrites) + 5


def test_the_unsound_rule_of_a_transformer_is_found_and_made_small(tmp_path):
    model = SmallTransformer().eval()
    options = {**EAGER, "pre_grad_custom_pass": SiluIsRelu}
    path = tmp_path / "repro.py"
    found = triptych.bisect(model, torch.randint(0, 64, (2, 8)), options=options, repro=path)
    assert found.verdict == AT_FAULT and found.rewrites > 100
    assert found.compiles <= most_compiles(found.rewrites)
    assert found.rewrite.pass_name == "pre_grad_custom_pass" and found.rewrite.rule == "silu_is_relu"
    assert found.rewrite.node == "silu" and found.rewrite.source.startswith("demo.py:")
    assert [line[0] for line in found.rewrite.changes] == ["-", "+", "-", "+"]
    assert "silu" in found.rewrite.changes[0] and "relu" in found.rewrite.changes[1]
    assert found.repro == path and found.repro_size <= 10
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "output 0 differs" in done.stdout
    assert json.loads(json.dumps(found.to_dict()))["rewrite"]["rule"] == "silu_is_relu"


def test_a_rewrite_of_the_backward_graph_is_found():
    options = {**EAGER, "post_grad_custom_pre_pass": [CosIsSin]}
    x = torch.randn(5, requires_grad=True)
    found = triptych.bisect(lambda x: (x.sin() * 2).sum(), x, train=True, options=options)
    assert found.rewrite.graph == "backward" and found.rewrite.rule == "cos_is_sin"
    assert "gradient of input 0" in str(found.failure)


def test_a_rewrite_behind_a_graph_break_is_found():
    def model(x):
        y = x.clone() + x.clone()
        torch._dynamo.graph_break()
        return torch.nn.functional.silu(y).clone()

    found = triptych.bisect(model, torch.randn(5), options={**EAGER, "pre_grad_custom_pass": SiluIsRelu})
    assert found.rewrite.rule == "silu_is_relu" and found.rewrite.number > 1


def test_a_hook_that_is_a_function_is_one_rewrite():
    found = triptych.bisect(lambda x: x.t().contiguous(), torch.randn(3, 4),
                            options={**EAGER, "pre_grad_custom_pass": negate_outputs})  # fmt: skip
    assert found.rewrite.rule == "negate_outputs"


def negate_outputs(graph):
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (tuple(graph.call_function(torch.neg, (value,)) for value in output.args[0]),)


def test_nothing_wrong_is_said():
    found = triptych.bisect(torch.nn.Linear(3, 3), torch.randn(2, 3), options=EAGER)
    assert found.verdict == EQUAL and found.compiles == 1 and "no difference" in str(found)


def test_nothing_compiled_is_an_error():
    with pytest.raises(triptych.TriptychError, match="nothing was compiled"):
        triptych.bisect(lambda n: n + 1, 3)


def test_a_function_that_dynamo_has_given_up_is_compiled_to_be_explained():
    """Dynamo compiles a function no more than so often, also for the tools that say what happens to it."""

    def program(x):
        return torch.relu(x) * 1

    x = torch.randn(8)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        torch.compile(program, backend=lambda gm, inputs: gm.forward)(x)
    assert triptych.explain(program, x).passes
    assert triptych.why_not("remove_noop_pass", program, x).fires
    assert triptych.bisect(program, x).rewrites


def test_explanations_do_not_use_up_the_recompiles_of_a_compiled_program():
    """Beside the user's own compiled code ours cannot be removed from Dynamo's cache, only made invalid."""

    def program(x):
        return torch.relu(x) * 1

    x, seen = torch.randn(8), []
    torch.compile(program, backend="eager")(x)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        triptych.explain(program, x, options=EAGER)
    torch.compile(program, backend=lambda gm, inputs: seen.append(gm) or gm.forward)(x)
    assert len(seen) == 1
    # and what the user compiles still counts
    for _ in range(torch._dynamo.config.recompile_limit):
        torch.compile(program, backend=lambda gm, inputs: seen.append(gm) or gm.forward)(x)
    assert len(seen) == torch._dynamo.config.recompile_limit - 1


def test_what_is_not_our_rewrites_is_said():
    def good(compiled):
        return False

    found = triptych.bisect(lambda x: x + 1, torch.randn(3), options=EAGER, check=good)
    assert found.verdict == NOT_OURS and found.compiles == 2
    assert "even with no rewrites" in str(found) and "code generator" in str(found)


def test_the_option_that_makes_the_difference_is_named(monkeypatch):
    """As if Inductor's kernels were wrong."""
    from triptych.explaining import replay

    real = replay.Subject.check

    def check(self, options, limit=None):
        if options.codegen == "inductor":
            return replay.Failure("differs", "output 0 differs"), []
        return real(self, options, limit)

    monkeypatch.setattr(replay.Subject, "check", check)
    found = triptych.bisect(lambda x: x + 1, torch.randn(3))
    assert found.verdict == NOT_OURS
    assert found.notes == ["differs with codegen='inductor', and not with codegen='eager'"]


def test_a_check_of_ones_own():
    x = torch.tensor([-3.0, 2.0])
    options = {**EAGER, "pre_grad_custom_pass": SiluIsRelu}
    found = triptych.bisect(torch.nn.SiLU(), x, options=options, check=lambda model: bool((model(x) != 0).all()))
    assert found.rewrite.rule == "silu_is_relu"


def test_a_tolerance_takes_the_place_of_rounding():
    options = {**EAGER, "pre_grad_custom_pass": SiluIsRelu}
    x = torch.full((4,), 30.0)
    assert triptych.bisect(torch.nn.SiLU(), x, options=options, tolerance=1e-3).verdict == EQUAL
    assert triptych.bisect(torch.nn.SiLU(), -x / 30, options=options, tolerance=1e-3).verdict == AT_FAULT


def test_the_model_and_its_inputs_are_as_they_were():
    model, x = torch.nn.BatchNorm1d(3), torch.randn(4, 3)
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    triptych.bisect(model, x, train=True, options=EAGER)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state()) and model.weight.grad is None


CRASHING = """
import torch
import triptych


class Unlowerable(triptych.Rule):
    '''exp(x) -> an operation without a kernel'''

    def pattern(self, op, x):
        return op.exp(x)

    def rewrite(self, op, x):
        if not hasattr(torch.ops, "bisect_test") or not hasattr(torch.ops.bisect_test, "exp"):
            library = torch.library.Library("bisect_test", "DEF")
            library.define("exp(Tensor x) -> Tensor")
            library.impl("exp", lambda x: torch.empty_like(x), "Meta")
            torch.ops.bisect_test.library = library
        return op.call(torch.ops.bisect_test.exp.default, x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.clone()).exp().sum(-1).clone()


model, args = Model(), (torch.randn(2, 4),)
options = {"codegen": "eager", "post_grad_custom_pre_pass": Unlowerable}
"""


def test_a_crash_is_found_from_the_command_line_and_reproduced(tmp_path):
    file, out = tmp_path / "subject.py", tmp_path / "repro.py"
    file.write_text(CRASHING)
    result = CliRunner().invoke(main, ["bisect", str(file), "--json", "--out", str(out)])
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["rewrite"]["rule"] == "unlowerable", result.output
    assert data["failure"]["kind"].startswith("raises")
    done = subprocess.run([sys.executable, str(out)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert "bisect_test" in done.stdout


COMMAND = """
import sys
sys.path.insert(0, {folder!r})
import torch
import triptych
from subject import Wrong

x = torch.tensor([-1.0, 2.0])
options = {{"codegen": "eager", "pre_grad_custom_pass": Wrong}}
model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.SiLU(), torch.nn.Identity())
compiled = torch.compile(lambda x: model(x.clone()).clone() + 1, backend=triptych.compile_fx, options=options)
sys.exit(0 if torch.allclose(compiled(x), model(x) + 1) else 1)
"""

WRONG_RULE = """
import triptych


class Wrong(triptych.Rule):
    '''silu(x) -> relu(x)'''

    def pattern(self, op, x):
        return op.silu(x)

    def rewrite(self, op, x):
        return op.relu(x)
"""


@pytest.mark.slow
def test_a_command_says_what_is_good(tmp_path):
    (tmp_path / "subject.py").write_text(WRONG_RULE)
    check = tmp_path / "check.py"
    check.write_text(COMMAND.format(folder=str(tmp_path)))
    found = bisect_command(f"{sys.executable} {check}")
    assert found.rewrite.rule == "wrong" and found.compiles <= most_compiles(found.rewrites)
    assert any("relu" in line for line in found.rewrite.changes)
    check.write_text("")
    with pytest.raises(triptych.TriptychError, match="compiled nothing"):
        bisect_command(f"{sys.executable} {check}")


def test_a_command_without_rewrites_is_good(tmp_path):
    """A compile that needs no rewrite is told apart from a command that compiles nothing."""
    check = tmp_path / "check.py"
    check.write_text(
        "import torch, triptych\n"
        "torch.compile(torch.sin, backend=triptych.compile_fx, options={'codegen': 'eager'})(torch.ones(3))\n"
    )
    found = bisect_command(f"{sys.executable} {check}")
    assert (found.verdict, found.rewrites) == (EQUAL, 0)


@pytest.mark.parametrize("code", [0, 3])
def test_a_check_that_compiles_nothing_is_an_error(code):
    result = CliRunner().invoke(main, ["bisect", "--check", f"exit {code}"])
    assert result.exit_code == 2 and "compiled nothing with Triptych" in result.output
    assert CliRunner().invoke(main, ["bisect"]).exit_code == 2


@pytest.mark.parametrize(("last", "wanted"), [(1, 1), (2, 1), (2, 2), (17, 9), (1000, 1), (1000, 501), (1000, 1000)])
def test_the_search_is_logarithmic(last, wanted):
    asked = []

    def is_bad(number):
        asked.append(number)
        return number >= wanted

    assert first_bad(is_bad, last) == wanted
    assert len(asked) <= math.ceil(math.log2(last)) + 1


# ---- the limit ----

CASES = [
    pytest.param(subject, example, example.dialects[0], id=subject.name)
    for subject in list(subjects())
    for example in [e for e in subject.examples if e.fires][:1]
]


SEVERAL_AT_ONCE = ("batch_operations", "batch_aten", "group_linears", "gumbel_max", "move_up", "build_on_gpu")
"""Rules of which one site counts as several rewrites: whole or not at all."""


def run_limited(subject: Rule | type[Pass], example, dialect, limit):
    gm, _ = capture(example.program, make_inputs(example), dialect, example.dynamic)
    if example.prepare is not None:
        example.prepare(gm.graph)
    before = fingerprint(gm.graph)
    options = Options.make(example.options)
    rewriter = Rewriter(Program(gm, (), options, example.is_inference), subject.name, limit)
    if isinstance(subject, Rule):
        rule = type(subject)(**example.settings) if example.settings else subject
        tally = run_rules(rewriter, [rule], strict=True)
    else:
        tally = pass_with_options(subject, options).run(rewriter, strict=True)
    assert rewriter.rewrites == tally.fired.total()
    return before, fingerprint(gm.graph), rewriter


@pytest.mark.parametrize(("subject", "example", "dialect"), CASES)
def test_every_rule_and_pass_obeys_the_limit(subject, example, dialect):
    before, after, rewriter = run_limited(subject, example, dialect, None)
    _, untouched, stopped = run_limited(subject, example, dialect, 0)
    assert untouched == before and stopped.rewrites == 0 and stopped.stopped
    _, _, one = run_limited(subject, example, dialect, 1)
    assert one.rewrites == 1 or (one.rewrites == 0 and subject.name in SEVERAL_AT_ONCE)
    _, whole, _ = run_limited(subject, example, dialect, rewriter.rewrites)
    assert whole == after


def test_a_limit_leaves_a_prefix_over_all_stages():
    model, args = SmallTransformer(), (torch.randint(0, 64, (2, 8)),)

    def fired(limit):
        with watching(limit) as sessions:
            compiled = torch.compile(model, backend=triptych.compile_fx, options=EAGER)
            compiled(*args).sum().backward()
            torch._dynamo.reset()
        return [(r.name, r.graph, r.fired) for s in sessions for r in s.records if r.rewrites]

    everything = fired(None)
    count = sum(rules.total() for _, _, rules in everything)
    assert {graph for _, graph, _ in everything} >= {"pre_grad", "joint"}
    for limit in (0, count // 3, count - 1):
        got = fired(limit)
        assert sum(rules.total() for _, _, rules in got) == limit
        assert got[:-1] == everything[: len(got)][:-1]
        if got:
            name, graph, rules = everything[len(got) - 1]
            assert got[-1][:2] == (name, graph) and got[-1][2] <= rules


# ---- torch's own bisector, and threads ----


def test_torchs_bisector_names_our_pass():
    from torch._inductor.compiler_bisector import CompilerBisector

    def is_good():
        torch._dynamo.reset()
        x = torch.tensor([-1.0, 2.0])
        options = {**EAGER, "pre_grad_custom_pass": SiluIsRelu}
        compiled = torch.compile(torch.nn.functional.silu, backend=triptych.compile_fx, options=options)
        return torch.allclose(compiled(x), torch.nn.functional.silu(x))

    with torch._inductor.config.patch({"test_configs.bisect_keep_custom_backend_for_inductor": True}):
        result = CompilerBisector.do_bisect(is_good)
    assert result.backend == "inductor" and result.subsystem == "pre_grad_passes"
    assert result.debug_info == "triptych pre_grad pre_grad_custom_pass"
    assert not is_good()


def test_torchs_bisector_knows_every_stage():
    assert set(SUBSYSTEMS) == set(STAGES)


@pytest.mark.parametrize("count", [2, 4])
def test_threads_that_explain_see_their_own_programs(count):
    barrier, seen = threading.Barrier(count), {}

    def work(number):
        def model(x):
            for _ in range(number + 1):
                x = x.sin()
            return x

        barrier.wait()
        for _ in range(2):
            seen.setdefault(number, []).append(triptych.explain(model, torch.randn(3), options=EAGER))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(count))
    for number, explanations in seen.items():
        for explanation in explanations:
            (session,) = explanation.sessions
            assert str(session.graphs["dynamo"].code).count("sin()") == number + 1


def test_what_another_thread_compiles_is_not_ours():
    with watching() as sessions:
        compiled = torch.compile(lambda x: x.cos(), backend=triptych.compile_fx, options=EAGER)
        thread = threading.Thread(target=compiled, args=(torch.randn(3),))
        thread.start()
        thread.join()
    assert sessions == []


def test_a_backward_on_another_thread_is_collected_by_its_forward():
    with watching() as sessions:
        x = torch.randn(3, requires_grad=True)
        y = torch.compile(lambda x: x.sin().sum(), backend=triptych.compile_fx, options=EAGER)(x)
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    (session,) = sessions
    assert any(r.graph == "backward" for r in session.records)
